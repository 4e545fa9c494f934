//! A second process of this program, with a deadline.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A child that is told lines and answers with lines; killed and reaped when it goes out of scope.
pub(crate) struct Peer {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    deadline: Instant,
}

impl Peer {
    /// Starts this program again with these arguments.
    pub(crate) fn start(arguments: &[&str], time: Duration) -> Result<Self> {
        Self::start_with(arguments, &[], time)
    }

    /// The same, with these variables in its environment beside this process's own.
    pub(crate) fn start_with(arguments: &[&str], variables: &[(&str, &str)], time: Duration) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut child = Command::new(program)
            .args(arguments)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the second process")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the second process has no output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, stdin, lines, deadline: Instant::now() + time })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("the second process is no longer listening")?;
        writeln!(stdin, "{line}").context("writing to the second process")
    }

    /// The next line.
    pub(crate) fn hear(&mut self) -> Result<String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => bail!("the second process did not answer in time"),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().context("waiting for the second process")?;
                bail!("the second process ended early ({status}); its error stands above")
            }
        }
    }

    /// Waits until the child has ended well.
    pub(crate) fn finish(mut self) -> Result<()> {
        drop(self.stdin.take());
        // Its end closes its output, which ends the stream of lines.
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => bail!("the second process did not end in time"),
            Ok(line) => bail!("the second process said more than expected: {line}"),
        }
        let status = self.child.wait().context("waiting for the second process")?;
        if !status.success() {
            bail!("the second process failed ({status})");
        }
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
