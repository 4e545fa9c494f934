//! Processes of the tests of this folder: the roles of a test, and examples.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The variable that names the role of a process.
const ROLE: &str = "DEVICE_IPC_TEST_ROLE";

/// Returns why CUDA is unavailable, for the message of a skipped test.
pub(crate) fn no_cuda() -> Option<String> {
    device_ipc::Backends::registered().named("cuda").err().map(|reason| reason.to_string())
}

/// Returns the role of this process.
pub(crate) fn role() -> String {
    std::env::var(ROLE).expect("set by the test that starts the role")
}

/// Returns an argument of the role.
pub(crate) fn argument(name: &str) -> String {
    std::env::var(argument_variable(name)).expect("set by the test that starts the role")
}

fn argument_variable(name: &str) -> String {
    format!("DEVICE_IPC_TEST_ARGUMENT_{name}")
}

/// A process with a time limit. Dropping it kills and reaps it.
pub(crate) struct Process {
    name: String,
    child: Child,
    lines: Receiver<String>,
    input: Option<ChildStdin>,
    deadline: Instant,
}

impl Process {
    /// Starts the test `role` of this program in another process.
    pub(crate) fn role(role: &str, arguments: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
        command.args(["--exact", "role", "--nocapture", "--ignored"]).env(ROLE, role);
        command.envs(arguments.iter().map(|(name, value)| (argument_variable(name), value)));
        if let Some(path) = search_path() {
            command.env("LD_LIBRARY_PATH", path);
        }
        Self::start(role, &mut command)
    }

    /// Starts a program.
    pub(crate) fn start(name: &str, command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        // Exits when the process and its children have closed the pipe.
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok())
        });
        let input = child.stdin.take();
        Self {
            name: name.to_owned(),
            child,
            lines,
            input,
            deadline: Instant::now() + Duration::from_secs(120),
        }
    }

    /// Waits for the next line for which `wanted` returns a value; returns the value.
    pub(crate) fn line<T>(&self, mut wanted: impl FnMut(&str) -> Option<T>) -> T {
        let mut seen = Vec::new();
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|error| {
                panic!("{} did not print what it should: {error}; it printed {seen:#?}", self.name)
            });
            if let Some(found) = wanted(&line) {
                return found;
            }
            seen.push(line);
        }
    }

    /// Returns its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Presses the Enter key.
    pub(crate) fn enter(&mut self) {
        self.input.as_mut().expect("not taken").write_all(b"\n").expect("the process reads");
    }

    /// Writes a line to the process.
    pub(crate) fn send(&mut self, line: &str) {
        let input = self.input.as_mut().expect("not taken");
        input.write_all(format!("{line}\n").as_bytes()).expect("the process reads");
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it is reaped");
    }

    /// Asserts that the process runs and is within its time limit.
    pub(crate) fn assert_running(&mut self) {
        assert!(Instant::now() < self.deadline, "{} did not finish in time", self.name);
        let status = self.child.try_wait().expect("it can be waited for");
        assert!(status.is_none(), "{} exited early: {status:?}", self.name);
    }

    /// Waits until it exits, which must be a success.
    pub(crate) fn finish(mut self) {
        drop(self.input.take());
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                let rest: Vec<_> = self.lines.try_iter().collect();
                return assert!(status.success(), "{} failed: {status}; it printed {rest:#?}", self.name);
            }
            assert!(Instant::now() < self.deadline, "{} did not exit in time", self.name);
            std::thread::yield_now();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// cudarc finds libcuda by the dynamic linker alone, which must find the library that the backend loads.
fn search_path() -> Option<OsString> {
    let library = std::env::var_os(device_ipc::cuda::LIBRARY_VARIABLE)?;
    let mut path =
        Path::new(&library).parent().filter(|folder| !folder.as_os_str().is_empty())?.as_os_str().to_owned();
    if let Some(former) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(former);
    }
    Some(path)
}
