//! Support for examples with several processes: each role is a child process, which receives lines on its standard input and
//! sends lines on its standard output.

#![allow(dead_code, reason = "each example uses a part of it")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// Timeout of each step.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A role of this program in a child process, which is killed and reaped on drop.
pub(crate) struct Role {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Role {
    /// Starts this program with the role's name as its argument.
    pub(crate) fn start(role: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a child process")?;
        let output = BufReader::new(child.stdout.take().context("the child process has no standard output")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(std::io::Result::ok).all(|line| sender.send(line).is_ok())
        });
        Ok(Self { input: child.stdin.take(), child, lines })
    }

    /// Writes a line to its standard input. Descriptors are not passed as arguments, because every user can read those.
    pub(crate) fn send_line(&mut self, line: &str) -> Result<()> {
        self.send_bytes(format!("{line}\n").as_bytes())
    }

    /// Writes bytes to its standard input.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let input = self.input.as_mut().context("the standard input of the child process is closed")?;
        input.write_all(bytes).and_then(|()| input.flush()).context("cannot write to the child process")
    }

    /// Closes its standard input.
    pub(crate) fn close_input(&mut self) {
        drop(self.input.take());
    }

    /// Waits for this line of its standard output.
    pub(crate) fn expect(&self, expected: &str) -> Result<()> {
        let line = self
            .lines
            .recv_timeout(TIMEOUT)
            .with_context(|| format!("no line {expected:?} from process {}", self.child.id()))?;
        println!("[process {}] {line}", self.child.id());
        ensure!(line == expected, "process {} wrote {line:?} instead of {expected:?}", self.child.id());
        Ok(())
    }

    /// Prints its remaining output, and waits until it exits successfully.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.close_input();
        // The exit of the process closes its output.
        loop {
            match self.lines.recv_timeout(TIMEOUT) {
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("process {} did not exit: timed out", self.child.id())
                }
                Ok(line) => println!("[process {}] {line}", self.child.id()),
            }
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "process {} failed: {status}", self.child.id());
        Ok(())
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
