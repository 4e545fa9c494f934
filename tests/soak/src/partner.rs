//! Child processes of this program, with a deadline for every answer.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context, Result, bail};

use crate::rows::Row;
use crate::{Options, TIMEOUT};

/// The importing process of a row. Dropping it kills and reaps it.
#[derive(Debug)]
pub(crate) struct Partner {
    process: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Partner {
    /// Starts an importer, and waits until it has its device.
    pub(crate) fn start(device: u32) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["importer", &device.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the importer")?;
        let stdin = process.stdin.take().context("its input is piped")?;
        let output = BufReader::new(process.stdout.take().context("its output is piped")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(std::io::Result::ok).all(|line| sender.send(line).is_ok())
        });
        let mut partner = Self { process, stdin, lines };
        partner.answer()?;
        Ok(partner)
    }

    /// Sends a command and does not wait for the answer.
    pub(crate) fn send(&mut self, command: &str) -> Result<()> {
        writeln!(self.stdin, "{command}").context("the importer no longer reads commands")
    }

    /// Waits for the answer to the last command.
    pub(crate) fn answer(&mut self) -> Result<String> {
        let line = self.lines.recv_timeout(TIMEOUT).context("the importer did not answer in time")?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("ok", rest) => Ok(rest.to_owned()),
            _ => bail!("the importer failed: {line}"),
        }
    }

    /// Sends a command and waits for the answer.
    pub(crate) fn ask(&mut self, command: &str) -> Result<String> {
        self.send(command)?;
        self.answer()
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs one row in an exporter process of its own, whose output is this program's. Returns whether the row passed.
pub(crate) fn run_row(row: Row, options: &Options) -> Result<bool> {
    let status = Command::new(std::env::current_exe()?)
        .args(["--rounds", &options.rounds.to_string()])
        .args(["--warm-up", &options.warm_up.to_string()])
        .args(["--device", &options.device.to_string()])
        .args(["--kill-every", &options.kill_every.to_string()])
        .args(["exporter", row.name()])
        .status()
        .with_context(|| format!("starting the exporter of the row {}", row.name()))?;
    Ok(status.success())
}
