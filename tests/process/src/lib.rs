//! Child processes of tests.
//!
//! Each process has a time limit for every answer, and is killed and reaped on drop. The functions panic where a process does
//! otherwise than its test expects.
//!
//! [`Process`] exchanges lines with a program, usually another test of the same program ([`Process::of_test`]), which
//! [`serve`]s requests. [`SocketProcess`] exchanges messages that may carry a file descriptor with [`serve_socket`].
//! [`output_of`] runs a command until it exits. [`Census`] counts the resources of a process that the
//! kernel reports, [`Heap`] the memory of a process that has the allocator [`CountingHeap`].
#![deny(unsafe_code)]

mod census;
mod heap;
mod output;
mod socket;

use std::fmt::Display;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid};

pub use census::{Census, shared_memory_objects};
pub use heap::{CountingHeap, Heap, allocations_of_this_thread};
pub use output::output_of;
pub use socket::{SocketProcess, serve_socket};

/// Time limit of an answer, and of the exit of a process.
const LIMIT: Duration = Duration::from_secs(90);

/// Marks an answer: the test harness writes to the same output, and not only whole lines.
const ANSWER: &str = "ANSWER ";

/// A process that exchanges lines with this one.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    lines: Receiver<String>,
    input: Option<ChildStdin>,
    begun: Instant,
}

impl Process {
    /// Starts a program; messages call it `name`.
    #[track_caller]
    pub fn start(name: &str, command: &mut Command) -> Self {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        // Exits when the process and its children have closed the pipe.
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok())
        });
        Self { name: name.to_owned(), input: child.stdin.take(), child, lines, begun: Instant::now() }
    }

    /// Starts an ignored test of this program in another process, with these environment variables. `path` is the test's path
    /// from the crate on, as `concat!(module_path!(), "::name")`.
    #[track_caller]
    pub fn of_test(path: &str, variables: &[(&str, &str)]) -> Self {
        let mut command = command_of_test(path);
        Self::start(path, command.envs(variables.iter().copied()))
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to the process.
    #[track_caller]
    pub fn send(&mut self, line: &str) {
        writeln!(self.input.as_mut().expect("not finished"), "{line}").expect("the process reads");
    }

    /// Waits for the next line for which `wanted` returns a value; returns the value.
    #[track_caller]
    pub fn line<T>(&self, mut wanted: impl FnMut(&str) -> Option<T>) -> T {
        let deadline = Instant::now() + LIMIT;
        let mut seen = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => match wanted(&line) {
                    Some(found) => return found,
                    None => seen.push(line),
                },
                Err(error) => {
                    panic!("{} did not print what it should: {error}; it printed {seen:#?}", self.name)
                }
            }
        }
    }

    /// Waits for the next [`answer`] of the process.
    #[track_caller]
    pub fn receive(&self) -> String {
        self.line(|line| line.split_once(ANSWER).map(|(_, text)| text.to_owned()))
    }

    /// Sends a request and waits for its answer.
    #[track_caller]
    pub fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.receive()
    }

    /// Suspends the process; returns when all of its threads have stopped.
    #[track_caller]
    pub fn suspend(&self) {
        self.signal(Signal::STOP);
        wait_for_state(self.id(), WaitIdOptions::STOPPED);
    }

    /// Continues the suspended process.
    #[track_caller]
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the process exists");
    }

    /// Kills the process by SIGKILL and reaps it.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asserts that the process has not exited, and was not started longer ago than an answer may take.
    #[track_caller]
    pub fn assert_running(&mut self) {
        assert!(self.begun.elapsed() < LIMIT, "{} did not finish in time", self.name);
        let status = self.child.try_wait().expect("it can be waited for");
        assert!(status.is_none(), "{} exited early: {status:?}", self.name);
    }

    /// Closes the input and waits until the process exits, which must be a success without a further answer.
    #[track_caller]
    pub fn finish(mut self) {
        drop(self.input.take());
        let status = wait(&mut self.child, LIMIT);
        let mut rest = Vec::new();
        // The pipe is open as long as a child of the process lives.
        while status.is_some()
            && let Ok(line) = self.lines.recv_timeout(Duration::from_millis(100))
        {
            rest.push(line);
        }
        let success = status.is_some_and(|status| status.success());
        assert!(success, "{} ended with {status:?} (None: not in time); it printed {rest:#?}", self.name);
        let silent = !rest.iter().any(|line| line.contains(ANSWER));
        assert!(silent, "{} gave another answer: {rest:#?}", self.name);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns a command that runs an ignored test of this program; see [`Process::of_test`].
pub fn command_of_test(path: &str) -> Command {
    let mut command = command_of(path);
    command.arg("--ignored");
    command
}

/// Returns the path of the test that this stands in, from the crate on.
#[macro_export]
macro_rules! this_test {
    () => {{
        fn here() {}
        std::any::type_name_of_val(&here).trim_end_matches("::here").trim_end_matches("::{{closure}}")
    }};
}

/// Runs the test that this stands in, which begins with it, in a process of its own; see [`alone()`].
#[macro_export]
macro_rules! alone {
    () => {
        if !$crate::alone($crate::this_test!()) {
            return;
        }
    };
}

fn command_of(path: &str) -> Command {
    let (_crate, test) = path.split_once("::").expect("a path from the crate on");
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", test, "--nocapture"]);
    // With one thread, the harness prints the name of the test at the begin of its first line.
    command.env("RUST_TEST_THREADS", "2");
    command
}

/// Returns whether this process runs only the test at this path ([`Process::of_test`]), whose counters, limits and variables are then
/// those of the process. Otherwise runs the test in such a process, which must pass.
#[track_caller]
pub fn alone(path: &str) -> bool {
    /// The variable that names the only test of a process.
    const ALONE: &str = "DEVICE_IPC_TEST_ALONE";
    if std::env::var_os(ALONE).is_some_and(|alone| alone == path) {
        return true;
    }
    let mut command = command_of(path);
    command.env(ALONE, path);
    let (passed, text) = output_of(command, LIMIT);
    print!("{text}");
    assert!(passed && text.contains("1 passed"), "{path} failed in a process of its own");
    false
}

/// In a process of [`Process::of_test`]: serves requests, each a word and its argument, until the end of input.
pub fn serve<T: Display>(mut answer_to: impl FnMut(&str, &str) -> T) {
    while let Some(line) = request() {
        let (request, argument) = line.split_once(' ').unwrap_or((&line, ""));
        answer(answer_to(request, argument));
    }
}

/// Returns the next request, or `None` after the end of input.
pub fn request() -> Option<String> {
    std::io::stdin().lock().lines().next().and_then(Result::ok)
}

/// Sends an answer, in one line.
pub fn answer(text: impl Display) {
    println!("\n{ANSWER}{}", text.to_string().replace('\n', " "));
}

/// Formats bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses hexadecimal digits.
///
/// # Panics
///
/// If the text has other characters, or an odd number of them.
pub fn unhex(text: &str) -> Vec<u8> {
    let digits = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal digits");
    (0..text.len()).step_by(2).map(digits).collect()
}

/// Waits until a child of this process has exited or is stopped, as the options name it.
#[track_caller]
pub fn wait_for_state(child: u32, options: WaitIdOptions) {
    let pid = i32::try_from(child).ok().and_then(Pid::from_raw).expect("a process id");
    let (sender, changed) = channel();
    // The kernel's wait has no time limit. The thread exits with the child.
    std::thread::spawn(move || sender.send(waitid(WaitId::Pid(pid), options).map(drop)));
    let status = changed.recv_timeout(LIMIT).expect("the child exits, or is stopped, in time");
    status.expect("it is a child of this process");
}

/// Waits until a child exits. Returns `None` if it does not within the limit.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let pid = Pid::from_child(child);
    let exit = pidfd_open(pid, PidfdFlags::empty()).expect("a descriptor of a child that is not reaped");
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            return Some(status);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        let timeout = Timespec::try_from(left).expect("a short time");
        // An interrupted wait is repeated.
        let _ = poll(&mut [PollFd::new(&exit, PollFlags::IN)], Some(&timeout));
    }
}
