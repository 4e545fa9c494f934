//! A second process: this program, which executes commands line by line, with optional file descriptors.

use std::ffi::c_int;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};

use crate::driver::{Driver, Handle, R};

/// The time limit of an answer.
const DEADLINE: Duration = Duration::from_secs(30);

/// The second process, which is killed and reaped on drop.
pub(crate) struct Other {
    child: Child,
    socket: OwnedFd,
}

impl Other {
    /// Starts the process, with the primary context of device 0.
    pub(crate) fn start(library: &Path) -> R<Self> {
        Self::start_through(library, &[])
    }

    /// Starts the process through another program, such as `unshare` with its arguments.
    pub(crate) fn start_through(library: &Path, through: &[&str]) -> R<Self> {
        let text = |error: std::io::Error| format!("cannot start a process: {error}");
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|error| text(error.into()))?;
        sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(DEADLINE))
            .map_err(|error| text(error.into()))?;
        let own = std::env::current_exe().map_err(text)?;
        let mut command = match through {
            [] => Command::new(&own),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(&own);
                command
            }
        };
        command.arg("--other").arg(library).stdin(Stdio::from(theirs)).stdout(Stdio::null());
        let child = command.spawn().map_err(text)?;
        let other = Self { child, socket: ours };
        other.ask("start")?;
        Ok(other)
    }

    /// Sends a command; the error is the text of the answer.
    pub(crate) fn ask(&self, command: &str) -> R<String> {
        Ok(self.ask_with(command, None)?.0)
    }

    pub(crate) fn ask_with(&self, command: &str, fd: Option<BorrowedFd<'_>>) -> R<(String, Option<OwnedFd>)> {
        send(self.socket.as_fd(), command, fd);
        let Some((answer, fd)) = receive(self.socket.as_fd()) else {
            return Err("the other process ended".into());
        };
        match answer.split_once(' ') {
            Some(("ok", text)) => Ok((text.to_owned(), fd)),
            Some((_, text)) => Err(text.to_owned()),
            None => Err(format!("the other process said '{answer}'")),
        }
    }

    pub(crate) fn number(&self, command: &str) -> R<u64> {
        self.ask(command)?.parse().map_err(|_| "no number".to_owned())
    }

    pub(crate) fn handle(&self, command: &str) -> R<Handle> {
        from_hex(&self.ask(command)?)
    }

    /// Sends a command, and returns the descriptor of its answer.
    pub(crate) fn fd(&self, command: &str) -> R<OwnedFd> {
        self.ask_with(command, None)?.1.ok_or_else(|| "no descriptor came".to_owned())
    }

    /// Kills the process by SIGKILL and reaps it.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(crate) fn hex(handle: Handle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> R<Handle> {
    let byte = |at: usize| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..64).map(byte).collect();
    bytes.and_then(|bytes| bytes.try_into().ok()).map(Handle).ok_or_else(|| "no handle".to_owned())
}

/// Serves commands until the first process exits.
pub(crate) fn serve(library: &Path) -> R {
    // Killed with the parent process.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| error.to_string())?;
    let driver = Driver::load(library)?;
    let input = std::io::stdin();
    while let Some((command, fd)) = receive(input.as_fd()) {
        let mut passed = None;
        let answer = match obey(&driver, &command, fd, &mut passed) {
            Ok(text) => format!("ok {text}"),
            Err(text) => format!("err {text}"),
        };
        send(input.as_fd(), &answer, passed.as_ref().map(AsFd::as_fd));
    }
    // Not by returning: streams may never complete.
    std::process::exit(0);
}

fn obey(driver: &Driver, command: &str, fd: Option<OwnedFd>, passed: &mut Option<OwnedFd>) -> R<String> {
    let words: Vec<&str> = command.split(' ').collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    let size = |at| number(at) as usize;
    let text = |number: u64| number.to_string();
    let nothing = |()| String::new();
    // SAFETY: the driver has just opened it for this process.
    let owned = |fd: c_int| unsafe { OwnedFd::from_raw_fd(fd) };
    match words[0] {
        "start" => driver.start(0).map(|_| String::new()),
        "pid" => Ok(std::process::id().to_string()),
        "alloc" => driver.alloc(size(1)).map(text),
        "free" => driver.mem_free(number(1)).map(nothing),
        "fill" => driver.fill(number(1), number(2) as u8, size(3)).map(nothing),
        "byte" => driver.byte(number(1)).map(|byte| byte.to_string()),
        "export" => driver.handle(number(1)).map(hex),
        "open" => driver.open(from_hex(words[1])?).map(text),
        "close" => driver.ipc_close_mem_handle(number(1)).map(nothing),
        "stream" => driver.stream().map(text),
        "write-value" => driver.stream_write_value(number(1), number(2), number(3), 0).map(nothing),
        "wait-value" => driver.stream_wait_value(number(1), number(2), number(3), 0).map(nothing),
        "synchronize" => driver.stream_synchronize(number(1)).map(nothing),
        "event" => driver.event(6).map(text),
        "export-event" => driver.event_handle(number(1)).map(hex),
        "open-event" => driver.open_event(from_hex(words[1])?).map(text),
        "destroy-event" => driver.event_destroy(number(1)).map(nothing),
        "record" => driver.event_record(number(1), number(2)).map(nothing),
        "query-event" => driver.event_query(number(1)).map(nothing),
        "create" => driver.create(size(1), 1).map(text),
        "map" => driver.map(number(1), size(2), 3).map(text),
        "export-fd" => {
            *passed = Some(owned(driver.export_fd(number(1))?));
            Ok(String::new())
        }
        "create-fabric" => driver.create(size(1), 8).map(text),
        "export-fabric" => driver.export_fabric(number(1)).map(hex),
        "import-fd" => {
            let fd = fd.ok_or("no descriptor came")?;
            driver.import_fd(fd.as_raw_fd()).map(text)
        }
        "pool" => driver.pool(1).map(text),
        "pool-fd" => {
            *passed = Some(owned(driver.pool_fd(number(1))?));
            Ok(String::new())
        }
        "from-pool" => driver.allocate_from(number(1), size(2)).map(text),
        "export-pointer" => driver.pool_pointer(number(1)).map(hex),
        other => Err(format!("no command {other}")),
    }
}

fn send(socket: BorrowedFd<'_>, text: &str, fd: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.into_iter().collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    // A process that has exited sends no answer.
    let _ = sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL);
}

/// Receives a message; `None` at the end of the stream, and after the deadline.
fn receive(socket: BorrowedFd<'_>) -> Option<(String, Option<OwnedFd>)> {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .ok()?
        .bytes;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    bytes.truncate(received);
    (received > 0).then(|| (String::from_utf8_lossy(&bytes).into_owned(), fd))
}
