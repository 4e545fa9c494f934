//! The second process of a row: this program again, told what to do line by line.

mod bundles;
mod channels;
mod echo;
mod footprint;
pub(crate) mod message;
mod rings;
mod serve;
mod words;

pub(crate) use bundles::{acknowledged, keep};
pub(crate) use channels::Transport;
use echo::connect;
pub(crate) use echo::{Socket, request};
pub(crate) use serve::{Arguments, run};
pub(crate) use words::{BACK, Page, THERE};

use anyhow::{Context, Result, bail};
use device_ipc::Descriptor;

use crate::raw::RawHandle;
use crate::wait::TIMEOUT;
use device_ipc_cli::child::ChildProcess;
use message::{Answer, Command};

/// The second process, seen from the first.
pub(super) struct Remote {
    process: ChildProcess,
}

impl Remote {
    /// Starts it, with these variables in its environment.
    pub(super) fn start(backend: &str, device: u32, variables: &[(&str, &str)]) -> Result<Self> {
        let arguments = ["peer", "--backend", backend, "--device", &device.to_string()];
        Ok(Self { process: ChildProcess::start_with(&arguments, variables, TIMEOUT * 4)? })
    }

    /// Says what to do, without waiting until it is done.
    pub(super) fn tell(&mut self, command: &Command) -> Result<()> {
        self.process.send(&serde_json::to_string(command)?)
    }

    /// The next answer.
    pub(super) fn hear(&mut self) -> Result<Answer> {
        let line = self.process.receive()?;
        match serde_json::from_str(&line).with_context(|| format!("the second process said {line:?}"))? {
            Answer::Failed { why } => bail!("in the second process: {why}"),
            answer => Ok(answer),
        }
    }

    pub(super) fn ask(&mut self, command: &Command) -> Result<Answer> {
        self.tell(command)?;
        self.hear()
    }

    /// Has something done that has no answer but its end.
    pub(super) fn order(&mut self, command: &Command) -> Result<()> {
        match self.ask(command)? {
            Answer::Done => Ok(()),
            other => bail!("the second process answered {command:?} with {other:?}"),
        }
    }

    pub(super) fn share(&mut self, blocks: usize, bytes: u64, times: usize) -> Result<Vec<Descriptor>> {
        let Answer::Shared { descriptors } = self.ask(&Command::Share { blocks, bytes, times })? else {
            bail!("the second process did not say what it shares");
        };
        descriptors.iter().map(|text| Ok(text.parse()?)).collect()
    }

    /// Bare handles for the process that the vendor's whitelist calls `peer`.
    pub(super) fn raw_handles(&mut self, blocks: usize, bytes: u64, peer: Vec<u8>) -> Result<Vec<RawHandle>> {
        let Answer::Handles { handles } = self.ask(&Command::RawHandles { blocks, bytes, peer })? else {
            bail!("the second process gave no handles");
        };
        Ok(handles)
    }

    /// Frees the blocks of all bare handles, which nobody has open any longer.
    pub(crate) fn forget_raw(&mut self) -> Result<()> {
        self.order(&Command::ForgetRaw)
    }

    /// Connects to a socket that the command makes.
    pub(super) fn socket(&mut self, command: &Command) -> Result<Socket> {
        let Answer::Listening { name } = self.ask(command)? else {
            bail!("the second process does not listen");
        };
        connect(&name)
    }

    /// Hears that what it was told is done.
    pub(super) fn done(&mut self) -> Result<()> {
        match self.hear()? {
            Answer::Done => Ok(()),
            other => bail!("the second process answered {other:?}"),
        }
    }

    /// How often its host has waited for a ring.
    pub(super) fn host_waits(&mut self) -> Result<u64> {
        match self.ask(&Command::HostWaits)? {
            Answer::Waits { count } => Ok(count),
            other => bail!("the second process answered {other:?}"),
        }
    }

    /// The name of the channel that the command listens for.
    pub(super) fn channel(&mut self, command: &Command) -> Result<String> {
        let Answer::Listening { name } = self.ask(command)? else {
            bail!("the second process does not listen");
        };
        Ok(name)
    }

    /// Waits for its end, which has to be a good one.
    pub(super) fn finish(self) -> Result<()> {
        self.process.finish()
    }
}
