//! A second process of a test, and their messages.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The prefix of a message: the test harness writes to the same output.
const MARK: &str = "@@ ";
const PATIENCE: Duration = Duration::from_secs(30);

/// A process that runs a role of a test. Killed and reaped on drop.
pub(crate) struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    messages: Receiver<String>,
}

impl Peer {
    pub(super) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the test starts itself");
        let (input, output) = (child.stdin.take(), child.stdout.take().expect("the output is a pipe"));
        let (sender, messages) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some((_, message)) = line.split_once(MARK) {
                    let _ = sender.send(message.to_owned());
                }
            }
        });
        Self { child, input, messages }
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, words: impl AsRef<str>) {
        let input = self.input.as_mut().expect("the input is open");
        writeln!(input, "{}", words.as_ref()).expect("the process listens");
    }

    /// Returns the next message.
    #[track_caller]
    pub(crate) fn receive(&self) -> String {
        self.messages.recv_timeout(PATIENCE).expect("the process says something in time")
    }

    /// Sends a message and returns the answer.
    #[track_caller]
    pub(crate) fn ask(&mut self, words: impl AsRef<str>) -> String {
        self.send(words);
        self.receive()
    }

    /// Kills the process, without a chance to clean up.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("the process can be killed");
        self.child.wait().expect("the process is reaped");
    }

    /// Closes the input and waits for the process, which must succeed.
    #[track_caller]
    pub(crate) fn finish(mut self) {
        drop(self.input.take());
        if let Err(problem) = wait(&mut self.child, PATIENCE) {
            panic!("the second process {problem}");
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The connection in a role: requests, line by line, until the end of input.
pub(crate) struct Requests;

impl Requests {
    /// Serves every request.
    pub(crate) fn serve(&self, mut answer: impl FnMut(&str) -> String) {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            self.send(answer(line.trim()));
        }
    }

    /// Sends a message to the test.
    pub(crate) fn send(&self, words: impl AsRef<str>) {
        println!("{MARK}{}", words.as_ref().replace('\n', " "));
    }

    /// Returns the next request, or `None` after the test has closed the input.
    pub(crate) fn receive(&self) -> Option<String> {
        std::io::stdin().lock().lines().next().and_then(Result::ok)
    }
}

/// Runs a process that must succeed in time, and returns its output.
#[track_caller]
pub(super) fn within(mut command: Command, deadline: Duration, what: &str) -> String {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the test starts itself");
    let output = [
        collect(child.stdout.take().expect("the output is a pipe")),
        collect(child.stderr.take().expect("the output is a pipe")),
    ];
    let ended = wait(&mut child, deadline);
    let said = output.map(|text| text.join().unwrap_or_default()).concat();
    if let Err(problem) = ended {
        panic!("{what} {problem}, and had said:\n{said}");
    }
    said
}

fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child, deadline: Duration) -> Result<(), String> {
    let begin = Instant::now();
    loop {
        match child.try_wait().expect("the process can be waited for") {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("ended with {status}")),
            None if begin.elapsed() < deadline => thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("did not end within {deadline:?}"));
            }
        }
    }
}
