//! The peer process of a row: this program, which executes commands from its standard input.

mod bundles;
mod channels;
mod echo;
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

use anyhow::{Context, Result, anyhow};
use device_ipc::Descriptor;
use serde::de::DeserializeOwned;

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

    /// Waits for the next reply, and returns its value.
    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = self.process.receive()?;
        let violation = || format!("protocol violation: the peer process wrote {line:?}");
        let reply: Reply = serde_json::from_str(&line).with_context(violation)?;
        let value = reply.map_err(|reason| anyhow!("in the peer process: {reason}"))?;
        serde_json::from_value(value).with_context(violation)
    }

    /// Sends a command and waits for its reply.
    pub(super) fn request<T: DeserializeOwned>(&mut self, command: &Command) -> Result<T> {
        self.send(command)?;
        self.receive()
    }

    /// Executes a command whose reply has no value.
    pub(super) fn execute(&mut self, command: &Command) -> Result<()> {
        self.request(command)
    }

    /// Waits for the reply of a command whose reply has no value.
    pub(super) fn wait_done(&mut self) -> Result<()> {
        self.receive()
    }

    pub(super) fn share(&mut self, blocks: usize, bytes: u64, times: usize) -> Result<Vec<Descriptor>> {
        self.request(&Command::Share { blocks, bytes, times })
    }

    /// Executes a command that listens on a raw socket, and connects to it.
    pub(super) fn socket(&mut self, command: &Command) -> Result<Socket> {
        connect(&self.request::<String>(command)?)
    }

    /// Waits until the peer exits successfully.
    pub(super) fn finish(self) -> Result<()> {
        self.process.finish()
    }
}
