//! A child process that runs this program again, with a deadline.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A child process that exchanges lines with this process over its standard input and output; it is killed and reaped on
/// drop.
pub struct ChildProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    deadline: Instant,
    timeout: Duration,
}

impl ChildProcess {
    /// Starts this program with these arguments. The timeout covers the child's whole lifetime.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot be started.
    pub fn start(arguments: &[&str], timeout: Duration) -> Result<Self> {
        Self::start_with(arguments, &[], timeout)
    }

    /// Starts this program with these arguments and additional environment variables.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot be started.
    pub fn start_with(arguments: &[&str], variables: &[(&str, &str)], timeout: Duration) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let mut child = Command::new(program)
            .args(arguments)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the child process")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the child process has no standard output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, stdin, lines, deadline: Instant::now() + timeout, timeout })
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to the child's standard input.
    ///
    /// # Errors
    ///
    /// Fails if the child has closed its standard input or exited.
    pub fn send(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("the standard input of the child process is closed")?;
        writeln!(stdin, "{line}").context("cannot write to the child process")
    }

    /// Waits for the next line of the child's standard output.
    ///
    /// # Errors
    ///
    /// Fails if the deadline passes or the child exits before it writes a line.
    pub fn receive(&mut self) -> Result<String> {
        match self.lines.recv_timeout(self.remaining()) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the child process did not answer: timed out after {:?}", self.timeout)
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().context("cannot wait for the child process")?;
                bail!("the child process exited before it answered ({status}); its error is printed above")
            }
        }
    }

    /// Closes the child's standard input and waits until the child exits.
    ///
    /// # Errors
    ///
    /// Fails if the deadline passes, the child writes another line, or its exit status is not 0.
    pub fn finish(mut self) -> Result<()> {
        drop(self.stdin.take());
        // The exit of the child closes its standard output, which ends the stream of lines.
        match self.lines.recv_timeout(self.remaining()) {
            Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => {
                bail!("the child process did not exit: timed out after {:?}", self.timeout)
            }
            Ok(line) => bail!("the child process wrote an unexpected line: {line}"),
        }
        let status = self.child.wait().context("cannot wait for the child process")?;
        if !status.success() {
            bail!("the child process failed ({status}); its error is printed above");
        }
        Ok(())
    }

    fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
