//! Hostile processes, and system calls that a kernel or a sandbox refuses to an honest one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_ipc_conformance::agent::Answer;
use device_ipc_core::Result;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{AddressFamily, SendFlags, SocketType, sockopt};

use super::Agent;
use crate::raw::{Connection, Received};

/// `SO_PASSRIGHTS` of `asm-generic/socket.h`, since Linux 6.16.
const SO_PASSRIGHTS: u32 = 83;

/// Makes system calls fail from now on, in all threads.
pub(super) fn deny(names: &[String]) -> Answer {
    let mut filter = vec![load(0)];
    for name in names {
        let number = match name.as_str() {
            "passrights" => libc::SYS_setsockopt,
            "memfd_create" => libc::SYS_memfd_create,
            "pidfd_open" => libc::SYS_pidfd_open,
            "epoll_create1" => libc::SYS_epoll_create1,
            "statx" => libc::SYS_statx,
            "getrandom" => libc::SYS_getrandom,
            "accept4" => libc::SYS_accept4,
            other => panic!("unknown system call {other}"),
        };
        if name == "passrights" {
            // The third argument of setsockopt(2), its lower half on a little-endian machine.
            filter.push(unless_equal(number as u32, 4));
            filter.push(load(32));
            filter.push(unless_equal(SO_PASSRIGHTS, 1));
            filter.push(answer(libc::SECCOMP_RET_ERRNO | libc::ENOPROTOOPT as u32));
            filter.push(load(0));
        } else {
            filter.push(unless_equal(number as u32, 1));
            filter.push(answer(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32));
        }
    }
    filter.push(answer(libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program is as long as it says, and the kernel copies it.
    let status = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    Answer::Done
}

/// Loads a 32-bit field of `struct seccomp_data`.
fn load(offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0)
}

/// Skips `skipped` instructions unless the loaded field equals `value`.
fn unless_equal(value: u32, skipped: u8) -> libc::sock_filter {
    instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, skipped)
}

fn answer(value: u32) -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, value, 0)
}

fn instruction(code: u32, k: u32, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf, k }
}

/// Returns a TCP socket with unsent data whose last close waits for `time`.
fn lingering(time: Duration) -> (OwnedFd, Vec<OwnedFd>) {
    let tcp = || rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    let listener = tcp();
    sockopt::set_socket_recv_buffer_size(&listener, 1024).expect("a small buffer");
    let address = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0);
    rustix::net::bind(&listener, &address).expect("a port");
    rustix::net::listen(&listener, 1).expect("it can listen");
    let sender = tcp();
    rustix::net::connect(&sender, &rustix::net::getsockname(&listener).expect("it is bound"))
        .expect("it listens");
    let reader = rustix::net::accept(&listener).expect("somebody has connected");
    while rustix::net::send(&sender, &[0; 65536], SendFlags::DONTWAIT).is_ok() {}
    sockopt::set_socket_linger(&sender, Some(time)).expect("it may linger");
    (sender, vec![listener, reader])
}

impl Agent {
    pub(super) fn linger(&mut self, socket: &str, seconds: u64, count: usize) -> Answer {
        let mut sent = 0;
        for _ in 0..count {
            let Ok(connection) = Connection::to(socket.as_bytes()) else { continue };
            let (socket, others) = lingering(Duration::from_secs(seconds));
            if connection.send_bytes(&[0], &[socket.as_fd()]).is_ok() {
                sent += 1;
            } else {
                // Else this process would wait for it itself.
                sockopt::set_socket_linger(&socket, None).expect("it may end at once");
            }
            drop(socket);
            self.connections.push(connection);
            self.descriptors.extend(others);
        }
        Answer::Number(sent)
    }

    /// Writes messages to the channel's socket forever that take longer to read than to send, as they lie in a memory file
    /// of 32 MiB. Returns when one has been sent.
    pub(super) fn flood_channel(&mut self, threads: usize) -> Answer {
        let before = std::mem::take(&mut self.sockets_before_connect);
        let socket = sockets().into_iter().find(|(_, inode)| !before.contains(inode));
        let (number, _) = socket.expect("the channel's socket is new");
        // SAFETY: the channel keeps it open.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        let connection = Arc::new(Connection::over(socket.try_clone_to_owned().expect("a descriptor")));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("device-ipc-test-message", flags).expect("a file");
        ftruncate(&file, 32 << 20).expect("it grows");
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE).expect("seals");
        let file = Arc::new(file);
        // A message in a file of this many bytes, as a varint. Zeros are an empty head, and bytes.
        let packet = [1, 0x80, 0x80, 0x80, 0x10];
        connection.send_bytes(&packet, &[file.as_fd()]).expect("there is room");
        for _ in 0..threads {
            let (connection, file) = (Arc::clone(&connection), Arc::clone(&file));
            std::thread::spawn(move || while connection.send_bytes(&packet, &[file.as_fd()]).is_ok() {});
        }
        Answer::Done
    }

    pub(super) fn remember_sockets(&mut self) -> Answer {
        self.sockets_before_connect = sockets().into_iter().map(|(_, inode)| inode).collect();
        Answer::Done
    }

    pub(super) fn squatted(&mut self) -> Answer {
        let visitor = self.squatted[0].accept();
        Answer::Number(match visitor.receive(Duration::from_secs(1)) {
            Received::Packet(bytes, _) => bytes.len() as u64,
            _ => 0,
        })
    }
}

/// Sends packets, one after each reply.
pub(super) fn converse(socket: &str, packets: &[String]) -> Answer {
    let Ok(connection) = Connection::to(socket.as_bytes()) else {
        return Answer::Text("no-connection".into());
    };
    let hex = data_encoding::HEXLOWER;
    let mut heard = String::new();
    for packet in packets {
        // A connection that was refused is closed; the reply says so.
        let _ = connection.send_bytes(&hex.decode(packet.as_bytes()).expect("bytes in hex"), &[]);
        heard.push_str(&match connection.receive(Duration::from_secs(2)) {
            Received::Packet(bytes, _) => hex.encode(&bytes) + " ",
            Received::Closed => "closed ".to_owned(),
            Received::Nothing => "nothing ".to_owned(),
        });
    }
    Answer::Text(heard)
}

pub(super) fn alarms(every: i64) -> Answer {
    extern "C" fn nothing(_: libc::c_int) {}
    let every = libc::timeval { tv_sec: 0, tv_usec: every };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: a handler that does nothing, and a timer of this process.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()), 0);
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()), 0);
    }
    Answer::Done
}

/// The sockets of this process: their numbers and what `/proc` calls them.
fn sockets() -> Vec<(i32, String)> {
    let listed = std::fs::read_dir("/proc/self/fd").expect("there is /proc");
    let socket = |entry: std::fs::DirEntry| {
        let target = std::fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
        let number = entry.file_name().to_string_lossy().parse().ok()?;
        target.starts_with("socket:").then_some((number, target))
    };
    listed.flatten().filter_map(socket).collect()
}

pub(super) fn timed_list(timeout: Duration) -> Result<Answer> {
    let begin = Instant::now();
    let listed =
        device_ipc_core::front_end::list_exports(None, &device_ipc_core::AllowList::own_user(), timeout)?;
    let pids = listed.iter().flatten().map(|process| process.pid.to_string() + " ");
    Ok(Answer::Text(format!("{} {}", begin.elapsed().as_millis(), pids.collect::<String>())))
}

pub(super) fn fork_and_exit() -> Answer {
    // SAFETY: the child does nothing but exit.
    match unsafe { libc::fork() } {
        // SAFETY: as above.
        0 => unsafe { libc::exit(0) },
        pid => {
            let pid = rustix::process::Pid::from_raw(pid).expect("fork succeeds");
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
    }
    Answer::Done
}
