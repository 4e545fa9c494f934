//! The peer process of a row: this program, which executes commands from its standard input.

mod bundles;
mod channels;
mod echo;
mod footprint;
pub(crate) mod message;
mod network;
mod rings;
mod serve;
mod tcp;
mod words;

pub(crate) use bundles::{keep, wait_acknowledgement};
pub(crate) use channels::Transport;
use echo::connect;
pub(crate) use echo::{Socket, request};
pub(crate) use serve::{Arguments, run};
pub(crate) use tcp::{ANSWER_BYTES, key};
pub(crate) use words::{Page, REQUEST, RESPONSE};

use anyhow::{Context, Result, bail};
use device_ipc::Descriptor;

use crate::raw::RawHandle;
use crate::wait::TIMEOUT;
use device_ipc_cli::child::ChildProcess;
use message::{Command, Reply};
pub(crate) use network::{BareMemory, engine};

/// A handle of the peer process.
pub(super) struct Remote {
    process: ChildProcess,
}

impl Remote {
    /// Starts the peer with additional environment variables.
    pub(super) fn start(backend: &str, device: u32, variables: &[(&str, &str)]) -> Result<Self> {
        let arguments = ["peer", "--backend", backend, "--device", &device.to_string()];
        Ok(Self { process: ChildProcess::start_with(&arguments, variables, TIMEOUT * 4)? })
    }

    /// Sends a command without waiting for its reply.
    pub(super) fn send(&mut self, command: &Command) -> Result<()> {
        self.process.send(&serde_json::to_string(command)?)
    }

    /// Waits for the next reply.
    pub(super) fn receive(&mut self) -> Result<Reply> {
        let line = self.process.receive()?;
        match serde_json::from_str(&line)
            .with_context(|| format!("protocol violation: the peer process wrote {line:?}"))?
        {
            Reply::Failed { reason } => bail!("in the peer process: {reason}"),
            answer => Ok(answer),
        }
    }

    /// Sends a command and waits for its reply.
    pub(super) fn request(&mut self, command: &Command) -> Result<Reply> {
        self.send(command)?;
        self.receive()
    }

    /// Executes a command whose reply has no value.
    pub(super) fn execute(&mut self, command: &Command) -> Result<()> {
        match self.request(command)? {
            Reply::Done => Ok(()),
            other => bail!("protocol violation: the peer process replied to {command:?} with {other:?}"),
        }
    }

    pub(super) fn share(&mut self, blocks: usize, bytes: u64, times: usize) -> Result<Vec<Descriptor>> {
        self.shared(&Command::Share { blocks, bytes, times })
    }

    pub(super) fn share_remappable(&mut self, blocks: usize, bytes: u64) -> Result<Vec<Descriptor>> {
        self.shared(&Command::ShareRemappable { blocks, bytes })
    }

    fn shared(&mut self, command: &Command) -> Result<Vec<Descriptor>> {
        let Reply::Shared { descriptors } = self.request(command)? else {
            bail!("protocol violation: the peer process did not reply with descriptors");
        };
        descriptors.iter().map(|text| Ok(text.parse()?)).collect()
    }

    /// Returns raw handles of new blocks, authorized for the process with this vendor id.
    pub(super) fn raw_handles(&mut self, blocks: usize, bytes: u64, peer: Vec<u8>) -> Result<Vec<RawHandle>> {
        let Reply::Handles { handles } = self.request(&Command::RawHandles { blocks, bytes, peer })? else {
            bail!("protocol violation: the peer process did not reply with handles");
        };
        Ok(handles)
    }

    /// Frees the blocks of all raw handles, which must be closed.
    pub(crate) fn free_raw(&mut self) -> Result<()> {
        self.execute(&Command::FreeRaw)
    }

    /// Executes a command that listens on a raw socket, and connects to it.
    pub(super) fn socket(&mut self, command: &Command) -> Result<Socket> {
        let Reply::Listening { name } = self.request(command)? else {
            bail!("protocol violation: the peer process does not listen");
        };
        connect(&name)
    }

    /// Waits for the reply of a command whose reply has no value.
    pub(super) fn wait_done(&mut self) -> Result<()> {
        match self.receive()? {
            Reply::Done => Ok(()),
            other => bail!("protocol violation: the peer process replied with {other:?}"),
        }
    }

    /// Returns how often the host thread of the peer has waited for a ring.
    pub(super) fn host_waits(&mut self) -> Result<u64> {
        match self.request(&Command::HostWaits)? {
            Reply::Waits { count } => Ok(count),
            other => bail!("protocol violation: the peer process replied with {other:?}"),
        }
    }

    /// Executes a command that listens for a channel, and returns the name of the channel.
    pub(super) fn channel(&mut self, command: &Command) -> Result<String> {
        let Reply::Listening { name } = self.request(command)? else {
            bail!("protocol violation: the peer process does not listen");
        };
        Ok(name)
    }

    /// Waits until the peer exits successfully.
    pub(super) fn finish(self) -> Result<()> {
        self.process.finish()
    }
}
