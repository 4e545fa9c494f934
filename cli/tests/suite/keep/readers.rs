//! Processes that open kept weights, and end.

use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Instant;

use device_ipc::mock::NAME as MOCK;
use device_ipc::{Access, ErrorKind, Ipc};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::Value;

use super::{TIMEOUT, ipc, keep, model, open, release, unique, values};
use crate::support::{Directory, Terminal, device_ipc, run, start_unread, wait};

/// The environment variables by which [`reader_process`] is a child of a test: the backend, and the name of the keeper.
const BACKEND: &str = "DEVICE_IPC_TEST_KEPT_ON";
const READER: &str = "DEVICE_IPC_TEST_KEPT_BY";

/// Opens weights, keeps them until it is killed, and states what becomes of them.
#[test]
#[ignore = "a child process of other tests"]
fn reader_process() {
    let (Ok(backend), Ok(name)) = (std::env::var(BACKEND), std::env::var(READER)) else { return };
    let ipc = if backend == MOCK { ipc() } else { Ipc::named(&backend).expect("the simulator") };
    let (version, mapping) = open(&ipc, &name).expect("opened");
    let (sender, events) = channel();
    let dropped = sender.clone();
    mapping.on_dropped(move || dropped.send(None).unwrap());
    mapping.on_gone(move |error| sender.send(Some(error.to_string())).unwrap());
    println!("\nopened version {version}");
    // It ends by itself if the test was killed.
    while let Ok(event) = events.recv_timeout(2 * TIMEOUT) {
        match event {
            None => println!("dropped, and has {:?}", values(&ipc, &mapping, "w")),
            Some(gone) => println!("gone: {gone}"),
        }
    }
}

/// Returns the command of a process that opens what this keeper keeps.
pub(crate) fn reader(backend: &str, name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "keep::readers::reader_process", "--ignored", "--nocapture"]);
    command.env(BACKEND, backend).env(READER, name);
    command
}

fn start_reader(name: &str) -> Terminal {
    let mut reader = Terminal::start(reader(MOCK, name));
    reader.until("opened version");
    reader
}

/// Waits until no process uses the weights of a keeper.
fn eventually_unused(keeper: &Terminal) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let listed: Value =
            serde_json::from_str(&run(["ps", "--timeout", "30s", "--json"]).good()).expect("a list");
        let processes = listed["processes"].as_array().expect("a list of processes");
        let own =
            processes.iter().find(|process| process["pid"] == keeper.pid()).expect("the keeper answers");
        if own["exports"][0]["held_by"] == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "{own}");
    }
}

#[test]
fn kept_tensor_is_read_by_name_until_the_keeper_stops() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("norm", &[1.0, 2.0, 3.0]), ("bias", &[-1.0])]);
    let name = unique("basic");
    let keeper = keep(&[&file, "--name", &name]);
    let at = format!("keeper:{name}");
    for _ in 0..2 {
        let read = run(["attach", &at, "read", "--tensor", "norm"]).good();
        assert!(read.contains("shape=[3] dtype=float32") && read.contains("mean=2.0"), "{read}");
    }
    let info = run(["attach", &at, "info"]).good();
    assert!(info.contains("norm") && info.contains("bias") && info.contains("read-only"), "{info}");
    // The keeper counts a process that has exited until it has noticed that.
    eventually_unused(&keeper);
    keeper.signal(Signal::TERM);
    let stopped = keeper.wait().good();
    assert!(stopped.contains("stopped by SIGTERM") && stopped.contains("the weights are freed"), "{stopped}");
    let error = run(["attach", &at, "read", "--tensor", "norm", "--timeout", "100ms"]).bad();
    assert!(error.contains("no keeper of") && error.contains("--list"), "{error}");
}

/// SIGTERM ends a keeper that has more to print than its output takes.
#[test]
fn keeper_with_unread_output_is_stopped_by_one_signal() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let mut command = device_ipc();
    command.args(["keep", &file, "--name", &unique("unread")]);
    let (mut keeper, _reader, _) = start_unread(command, "keeps version");
    kill_process(Pid::from_child(&keeper), Signal::TERM).expect("a signal");
    assert!(wait(&mut keeper).success());
}

/// A process that connects without end uses its own share of connections, and is logged once per second.
#[test]
fn refused_connections_leave_room_and_few_lines() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[7.0])]);
    let name = unique("refused");
    let keeper = keep(&[&file, "--name", &name]);
    let pid = Pid::from_raw(keeper.pid() as i32);
    let limit = Rlimit { current: Some(64), maximum: Some(64) };
    prlimit(pid, Resource::Nofile, limit).expect("a lower limit");
    let uid = rustix::process::geteuid().as_raw();
    let address = SocketAddrUnix::new_abstract_name(format!("device-ipc.{uid}.keeper.{name}").as_bytes());
    let address = address.expect("a name");
    let begin = Instant::now();
    let greedy: Vec<_> = (0..100)
        .map(|_| {
            let flags = SocketFlags::CLOEXEC;
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
            connect(&socket, &address).expect("it listens");
            socket
        })
        .collect();
    let read = run(["attach", &format!("keeper:{name}"), "read", "--tensor", "w"]).good();
    assert!(read.contains("mean=7.0"), "{read}");
    drop(greedy);
    keeper.signal(Signal::TERM);
    let stopped = keeper.wait();
    let lines = stopped.err.lines().filter(|line| line.contains("refusing a channel")).count() as u64;
    assert!((1..=1 + begin.elapsed().as_secs()).contains(&lines), "{}", stopped.err);
}

/// Garbage is no error of the keeper, which pauses after its own errors only.
#[test]
fn garbage_delays_no_reader() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("garbage");
    let keeper = keep(&[&file, "--name", &name]);
    let uid = rustix::process::geteuid().as_raw();
    for prefix in ["keeper", "keeper-control"] {
        let address =
            SocketAddrUnix::new_abstract_name(format!("device-ipc.{uid}.{prefix}.{name}").as_bytes());
        let address = address.unwrap();
        // More than the connections that may wait.
        for _ in 0..100 {
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            connect(&socket, &address).unwrap();
            rustix::io::write(&socket, b"GET / HTTP/1.1").unwrap();
            // The keeper answers with its version, and closes the connection.
            while matches!(rustix::io::read(&socket, &mut [0; 4096][..]), Ok(1..)) {}
        }
    }
    assert_eq!(values(&ipc(), &open(&ipc(), &name).unwrap().1, "w"), [1.0]);
    keeper.signal(Signal::TERM);
    let ended = keeper.wait();
    assert!(!ended.err.contains("could not be answered"), "{ended:?}");
    ended.good();
}

#[test]
fn kept_tensor_cannot_be_written() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("readonly");
    let _keeper = keep(&[&file, "--name", &name]);
    let error = run(["attach", &format!("keeper:{name}"), "add", "1", "--tensor", "w"]).bad();
    assert!(error.contains("read-only"), "{error}");
    let ipc = ipc();
    let kept = ipc.find(&name, TIMEOUT).unwrap();
    let refused = kept.open().access(Access::ReadWrite).at_home().unwrap_err();
    assert!(refused.kind() == ErrorKind::NotPermitted, "{refused}");
}

#[test]
fn writable_weights_are_shared_by_all_readers() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("writable");
    let _keeper = keep(&[&file, "--name", &name, "--writable"]);
    run(["attach", &format!("keeper:{name}"), "add", "1", "--tensor", "w"]).good();
    let ipc = ipc();
    assert_eq!(values(&ipc, &open(&ipc, &name).unwrap().1, "w"), [2.0]);
}

#[test]
fn killed_reader_leaves_no_lease() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("killed-reader");
    let keeper = keep(&[&file, "--name", &name]);
    let readers = [start_reader(&name), start_reader(&name)];
    let pids = readers.each_ref().map(Terminal::pid);
    let ipc = ipc();
    let readers_now = || ipc.find(&name, TIMEOUT).unwrap().readers();
    assert_eq!(readers_now(), 2);
    readers.into_iter().for_each(Terminal::kill);
    // The keeper's poller sees the closed sockets in its own time.
    let end = std::time::Instant::now() + TIMEOUT;
    while readers_now() > 0 {
        assert!(std::time::Instant::now() < end, "the leases of killed readers do not end");
        std::thread::yield_now();
    }
    keeper.signal(Signal::INT);
    // The grant of this process's last question may be on its way back, so that this process is listed.
    let stopped = keeper.wait().good();
    assert!(!pids.iter().any(|pid| stopped.contains(&pid.to_string())), "{stopped}");
}

#[test]
fn killed_keeper_is_reported_and_replaced_by_another() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("killed-keeper");
    let keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    let (sender, gone) = channel();
    mapping.on_gone(move |error| sender.send(error.to_string()).unwrap());
    keeper.kill();
    assert!(gone.recv_timeout(TIMEOUT).unwrap().contains("ended"));
    drop(mapping);
    let error = ipc.find(&name, std::time::Duration::from_millis(50)).unwrap_err();
    assert!(error.kind() == ErrorKind::Timeout, "{error}");
    // A process that waits for the name is answered by the next keeper.
    let waiting = std::thread::spawn({
        let (ipc, name) = (ipc.clone(), name.clone());
        move || open(&ipc, &name).map(|(version, mapping)| (version, values(&ipc, &mapping, "w")))
    });
    let _next = keep(&[&file, "--name", &name]);
    assert_eq!(waiting.join().unwrap().unwrap(), (1, vec![1.0]));
}

#[test]
fn stopping_keeper_names_its_readers_and_leaves_them_the_memory() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("stopped");
    let keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    keeper.signal(Signal::TERM);
    let out = keeper.wait().good();
    assert!(out.contains("notified") && out.contains(&std::process::id().to_string()), "{out}");
    release(&ipc, mapping);
}
