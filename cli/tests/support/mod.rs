//! The program in terminals of its own, each with a deadline.

#![allow(dead_code, reason = "each test file takes what it needs")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long one command may take.
const TIME: Duration = Duration::from_secs(60);

/// A command that runs. It is killed when it goes out of scope.
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

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    /// What it printed; it succeeded.
    #[track_caller]
    pub(crate) fn good(self) -> String {
        assert!(self.status.success(), "{self:?}");
        self.out
    }

    /// Its error; it failed, by itself.
    #[track_caller]
    pub(crate) fn bad(self) -> String {
        assert_eq!(self.status.code(), Some(1), "{self:?}");
        self.err
    }
}

/// The program on the mock. On a machine without cargo it lies elsewhere.
pub(crate) fn device_ipc() -> Command {
    let program = std::env::var("DEVICE_IPC_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_device-ipc").into());
    let mut command = Command::new(program);
    command.env("DEVICE_IPC_BACKEND", "mock").env("DEVICE_IPC_MOCK", "devices=2");
    for variable in ["DEVICE_IPC_KEY", "DEVICE_IPC_DESCRIPTOR", "DEVICE_IPC_SOCKET_DIR"] {
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

/// Runs the program on the mock to its end.
pub(crate) fn run<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Ended {
    start(arguments).end()
}

impl Terminal {
    pub(crate) fn start(mut command: Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let (sender, lines) = channel();
        listen(child.stdout.take().expect("piped"), Stream::Out, sender.clone());
        listen(child.stderr.take().expect("piped"), Stream::Err, sender);
        Self { child, lines, out: String::new(), err: String::new(), deadline: Instant::now() + TIME }
    }

    fn next(&mut self) -> Option<String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok((stream, line)) => {
                let text = if stream == Stream::Out { &mut self.out } else { &mut self.err };
                text.push_str(&line);
                text.push('\n');
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("nothing more came:\n{}{}", self.out, self.err),
        }
    }

    /// Waits for a line with these words.
    #[track_caller]
    pub(crate) fn until(&mut self, words: &str) -> String {
        loop {
            match self.next() {
                Some(line) if line.contains(words) => return line,
                Some(_) => {}
                None => panic!("{words:?} was not said:\n{}{}", self.out, self.err),
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(pid, signal).expect("it runs");
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Ended {
        while self.next().is_some() {}
        let status = self.child.wait().expect("it can be waited for");
        Ended { status, out: std::mem::take(&mut self.out), err: std::mem::take(&mut self.err) }
    }

    /// Kills it without a warning.
    pub(crate) fn kill(self) {
        self.signal(Signal::KILL);
        self.end();
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen(from: impl Read + Send + 'static, stream: Stream, to: Sender<(Stream, String)>) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            if to.send((stream, String::from_utf8_lossy(&line).into_owned())).is_err() {
                return;
            }
        }
    });
}

/// A folder that is removed at the end.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("a path in UTF-8").to_owned()
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).expect("it can be written");
        self.text(name)
    }

    /// A file with a key, for its owner alone.
    pub(crate) fn key(&self, name: &str, key: &str) -> String {
        use std::os::unix::fs::PermissionsExt;

        let path = self.file(name, format!("{key}\n").as_bytes());
        let own = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(Path::new(&path), own).expect("it is ours");
        path
    }
}

/// `send --file` with these arguments too, and the file, which is there.
pub(crate) fn send_by_file(folder: &Folder, arguments: &[&str]) -> (Terminal, String) {
    let file = folder.text("w.ipc");
    let mut sender = start(["send", "--file", &file].iter().chain(arguments));
    sender.until("wrote");
    (sender, file)
}
