//! What sender and receiver tell each other over TCP, once both have proved the key; JSON.

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::sealed::Sealed;
use super::wire::Deadline;

/// What a sender says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(crate) enum FromSender {
    /// The answer to [`FromReceiver::Ready`].
    Offer { descriptor: String, pid: u32 },
}

/// What a receiver says: `Ready`, then `Opened` and `Finished`, or `Failed`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(crate) enum FromReceiver {
    /// It has seen the sender's proof, and wants the descriptor.
    Ready,
    /// It has the tensor open; `place` is for people.
    Opened { pid: u32, place: String },
    /// It has done what it wanted, the device too; `summary` is for people.
    Finished { summary: String },
    /// It could not.
    Failed { error: String },
}

impl Sealed {
    pub(crate) fn say(&mut self, message: &impl Serialize, deadline: Deadline) -> Result<()> {
        self.send(&serde_json::to_vec(message)?, deadline)
    }

    pub(crate) fn hear<T: DeserializeOwned>(&mut self, deadline: Deadline) -> Result<T> {
        let bytes = self.receive(deadline)?;
        match serde_json::from_slice(&bytes) {
            Ok(message) => Ok(message),
            Err(error) => bail!("a message that this version does not know: {error}"),
        }
    }
}

impl FromSender {
    /// The descriptor's text and the sender's process id.
    pub(crate) fn offer(sealed: &mut Sealed, deadline: Deadline) -> Result<(String, u32)> {
        let Self::Offer { descriptor, pid } = sealed.hear(deadline).context("the descriptor did not come")?;
        Ok((descriptor, pid))
    }
}
