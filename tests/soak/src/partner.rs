//! Child processes of this program, with a time limit for every answer.

use std::process::Command;

use anyhow::{Context, Result, bail};
use device_ipc_conformance::Peer;

use crate::rows::Row;
use crate::{Options, TIMEOUT};

/// The importing process of a row. Dropping it kills and reaps it.
#[derive(Debug)]
pub(crate) struct Partner {
    peer: Peer,
}

impl Partner {
    /// Starts an importer and waits until it has its device.
    pub(crate) fn start(device: u32) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["importer", &device.to_string()]);
        let peer = Peer::start("importer", command).context("starting the importer")?;
        let mut partner = Self { peer };
        partner.answer()?;
        Ok(partner)
    }

    /// Sends a command and does not wait for the answer.
    pub(crate) fn send(&mut self, command: &str) -> Result<()> {
        self.peer.send_line(command).context("the importer no longer reads commands")
    }

    /// Waits for the answer to the last command.
    pub(crate) fn answer(&mut self) -> Result<String> {
        let line = self.peer.receive_line(TIMEOUT).context("the importer does not answer")?;
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
