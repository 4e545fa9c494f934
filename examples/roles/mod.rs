//! What the examples that need several processes have in common: each role of such a program is a child process that is
//! told things by its standard input, and says things by its standard output.

#![allow(dead_code, reason = "an example uses what it needs of it")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// Whatever takes longer has failed.
pub(crate) const TIME: Duration = Duration::from_secs(60);

/// A role of this program in a process of its own; killed and reaped when it goes out of scope.
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
            .context("starting another process of this program")?;
        let output = BufReader::new(child.stdout.take().context("its output is piped")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(std::io::Result::ok).all(|line| sender.send(line).is_ok())
        });
        Ok(Self { input: child.stdin.take(), child, lines })
    }

    /// A line for its standard input. A descriptor does not go into the arguments, which every user can read.
    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        self.tell_bytes(format!("{line}\n").as_bytes())
    }

    /// Bytes for its standard input.
    pub(crate) fn tell_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let input = self.input.as_mut().context("its input has ended")?;
        input.write_all(bytes).and_then(|()| input.flush()).context("telling another process")
    }

    /// Ends its standard input.
    pub(crate) fn end_input(&mut self) {
        drop(self.input.take());
    }

    /// Waits for this line of its standard output.
    pub(crate) fn expect(&self, expected: &str) -> Result<()> {
        let line = self.lines.recv_timeout(TIME).with_context(|| format!("waiting for {expected:?}"))?;
        println!("[process {}] {line}", self.child.id());
        ensure!(line == expected, "process {} said {line:?} instead of {expected:?}", self.child.id());
        Ok(())
    }

    /// Waits for its end, which has to be a good one, and shows what it still says.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.end_input();
        // Its output ends when it does.
        loop {
            match self.lines.recv_timeout(TIME) {
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => bail!("process {} did not end in time", self.child.id()),
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
