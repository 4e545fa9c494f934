//! Another process of this test program, which serves requests, one per line.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// The timeout of an answer.
const SOON: Duration = Duration::from_secs(60);

/// Another process, killed and reaped on drop.
pub(crate) struct OtherProcess {
    child: Child,
    input: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl OtherProcess {
    /// Starts an ignored test of this program, which [`serve`]s requests, with these environment variables.
    pub(crate) fn start(test: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        let (answer, answers) = channel();
        thread::spawn(move || {
            for line in output.map_while(Result::ok) {
                // Skips lines of the test harness.
                if let Some((_, text)) = line.split_once("ANSWER ") {
                    let _ = answer.send(text.to_owned());
                }
            }
        });
        Self { input: child.stdin.take(), child, answers }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn send(&mut self, request: &str) {
        writeln!(self.input.as_mut().unwrap(), "{request}").unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        self.answers.recv_timeout(SOON).expect("the other process answers")
    }

    pub(crate) fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.answer()
    }

    /// Closes the input and waits for the process, which must succeed.
    pub(crate) fn end(mut self) {
        drop(self.input.take());
        let silent = self.answers.recv_timeout(SOON);
        assert!(
            matches!(silent, Err(std::sync::mpsc::RecvTimeoutError::Disconnected)),
            "the other process should end, and: {silent:?}"
        );
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the other process ended with {status}");
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves requests, each a word and its argument, until the end of input.
pub(crate) fn serve(mut answer: impl FnMut(&str, &str) -> String) {
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let (request, argument) = line.split_once(' ').unwrap_or((&line, ""));
        println!("\nANSWER {}", answer(request, argument));
    }
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}
