//! Runs of the program in simulated terminals, each with a deadline.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use data_encoding::BASE64URL_NOPAD;
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, WaitIdOptions, kill_process};

/// Timeout of one command.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A running command; it is killed on drop.
pub(crate) struct Terminal {
    child: Child,
    lines: Receiver<(Stream, String)>,
    out: String,
    err: String,
    deadline: Instant,
}

#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Out,
    Err,
}

/// The result of a command that has exited.
#[derive(Debug)]
pub(crate) struct CommandResult {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl CommandResult {
    /// Returns its standard output; asserts that it succeeded.
    #[track_caller]
    pub(crate) fn good(self) -> String {
        assert!(self.status.success(), "{self:?}");
        self.out
    }

    /// Returns its standard error; asserts that it failed with exit code 2, for wrong usage.
    #[track_caller]
    pub(crate) fn usage(self) -> String {
        assert_eq!(self.status.code(), Some(2), "{self:?}");
        self.err
    }

    /// Returns its standard error; asserts that it failed with exit code 1.
    #[track_caller]
    pub(crate) fn bad(self) -> String {
        assert_eq!(self.status.code(), Some(1), "{self:?}");
        self.err
    }
}

/// Returns a command for the program on the mock. DEVICE_IPC_BIN names the program on a machine without cargo.
pub(crate) fn device_ipc() -> Command {
    let program = std::env::var("DEVICE_IPC_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_device-ipc").into());
    let mut command = Command::new(program);
    command.env("DEVICE_IPC_BACKEND", "mock").env("DEVICE_IPC_MOCK", "devices=2");
    for variable in ["DEVICE_IPC_DESCRIPTOR", "DEVICE_IPC_SOCKET_DIR", "DEVICE_IPC_REMOTE"] {
        command.env_remove(variable);
    }
    command
}

/// Starts the program on the mock with these arguments.
pub(crate) fn start<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Terminal {
    let mut command = device_ipc();
    command.args(arguments);
    Terminal::start(command)
}

/// Starts the program on the mock, with its sockets in this folder.
pub(crate) fn start_in(sockets: &str, arguments: &[&str]) -> Terminal {
    let mut command = device_ipc();
    command.args(arguments).env("DEVICE_IPC_SOCKET_DIR", sockets);
    Terminal::start(command)
}

/// Runs the program on the mock until it exits.
pub(crate) fn run<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> CommandResult {
    start(arguments).wait()
}

impl Terminal {
    pub(crate) fn start(mut command: Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let (sender, lines) = channel();
        forward_lines(child.stdout.take().expect("piped"), Stream::Out, sender.clone());
        forward_lines(child.stderr.take().expect("piped"), Stream::Err, sender);
        Self { child, lines, out: String::new(), err: String::new(), deadline: Instant::now() + TIMEOUT }
    }

    fn next(&mut self) -> Option<String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok((stream, line)) => {
                let output = if stream == Stream::Out { &mut self.out } else { &mut self.err };
                output.push_str(&line);
                output.push('\n');
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("timed out; output so far:\n{}{}", self.out, self.err),
        }
    }

    /// Waits for a line that contains this text.
    #[track_caller]
    pub(crate) fn until(&mut self, text: &str) -> String {
        loop {
            match self.next() {
                Some(line) if line.contains(text) => return line,
                Some(_) => {}
                None => panic!("{text:?} was not printed:\n{}{}", self.out, self.err),
            }
        }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(pid, signal).expect("the process is running");
    }

    /// Suspends it; returns when all of its threads have stopped.
    pub(crate) fn suspend(&self) {
        self.signal(Signal::STOP);
        device_ipc_test_process::wait_for_state(self.child.id(), WaitIdOptions::STOPPED);
    }

    /// Waits until it exits.
    pub(crate) fn wait(mut self) -> CommandResult {
        while self.next().is_some() {}
        let status = self.child.wait().expect("waiting for the process");
        CommandResult { status, out: std::mem::take(&mut self.out), err: std::mem::take(&mut self.err) }
    }

    /// Kills it.
    pub(crate) fn kill(self) {
        self.signal(Signal::KILL);
        self.wait();
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward_lines(from: impl Read + Send + 'static, stream: Stream, to: Sender<(Stream, String)>) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            if to.send((stream, String::from_utf8_lossy(&line).into_owned())).is_err() {
                return;
            }
        }
    });
}

/// A temporary directory that is removed on drop.
pub(crate) struct Directory(tempfile::TempDir);

impl Directory {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("the path is UTF-8").to_owned()
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).expect("writing a file");
        self.text(name)
    }
}

/// Starts `send --file` with additional arguments, and waits for the file.
pub(crate) fn send_by_file(directory: &Directory, arguments: &[&str]) -> (Terminal, String) {
    let file = directory.text("w.ipc");
    let mut sender = start(["send", "--file", &file].iter().chain(arguments));
    sender.until("wrote");
    (sender, file)
}

/// Waits until a child process exits, and kills it after the timeout.
pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    device_ipc_test_process::wait(child, TIMEOUT).unwrap_or_else(|| {
        let _ = child.kill();
        child.wait().expect("waiting for the process")
    })
}

/// Starts a command whose standard output is a pipe that takes no further bytes after the line with `text`, and is not read. Returns the
/// line too.
pub(crate) fn start_unread(mut command: Command, text: &str) -> (Child, std::io::PipeReader, String) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    // Opened again: the flag is one of the open file, and the child's has to wait.
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let mut filler = OpenOptions::new();
    let mut filler =
        filler.write(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path).expect("the pipe");
    let child = command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(writer).spawn().expect("a child");
    let mut lines = BufReader::new(&reader).lines();
    let mut next = || lines.next().expect("the process prints").expect("a line");
    let line = std::iter::repeat_with(&mut next).find(|line| line.contains(text)).expect("endless");
    while filler.write(&[b' '; 4096]).is_ok() || filler.write(b" ").is_ok() {}
    (child, reader, line)
}

/// Returns the range of the host id and the boot id in a descriptor, by docs/spec/descriptor.md.
pub(crate) fn host(_: &[u8]) -> std::ops::Range<usize> {
    20..52
}

/// Returns the descriptor with modified bytes in this range and a matching checksum.
pub(crate) fn altered(file: &str, range: impl Fn(&[u8]) -> std::ops::Range<usize>) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let mut bytes = BASE64URL_NOPAD.decode(text.trim().trim_start_matches("dipc1:").as_bytes()).unwrap();
    let range = range(&bytes);
    bytes[range].iter_mut().for_each(|byte| *byte ^= 0x5a);
    let end = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&checksum);
    format!("dipc1:{}", BASE64URL_NOPAD.encode(&bytes))
}

/// Copies the program. Another process writes the copy: a process that another thread starts meanwhile would inherit the descriptor, and
/// the copy could not be run as long as it has it.
pub(crate) fn copy_program(to: &Path) {
    let copied = Command::new("cp").arg(device_ipc().get_program()).arg(to).status().expect("cp starts");
    assert!(copied.success(), "cp {copied}");
}
