//! Messages between sender and receiver over an authenticated TCP connection, as JSON.

use anyhow::{Context, Result, bail};
use device_ipc_tcp::{AuthenticatedConnection, Deadline};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A message from the sender.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(crate) enum FromSender {
    /// The reply to [`FromReceiver::Ready`].
    Offer { descriptor: String, pid: u32 },
}

/// A message from the receiver: `Ready`, then `Opened` and `Finished`, or `Failed`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(crate) enum FromReceiver {
    /// The receiver has authenticated the sender and requests the descriptor.
    Ready,
    /// The receiver has opened the tensor; `place` is a description for the transcript.
    Opened { pid: u32, place: String },
    /// The receiver is done, including its device work; `summary` is text for the transcript.
    Finished { summary: String },
    /// The receiver failed.
    Failed { error: String },
}

/// Sends a message.
pub(crate) fn send(
    connection: &mut AuthenticatedConnection,
    message: &impl Serialize,
    deadline: Deadline,
) -> Result<()> {
    Ok(connection.send(&serde_json::to_vec(message)?, deadline)?)
}

/// Receives a message.
pub(crate) fn receive<T: DeserializeOwned>(
    connection: &mut AuthenticatedConnection,
    deadline: Deadline,
) -> Result<T> {
    let bytes = connection.receive(deadline)?;
    match serde_json::from_slice(&bytes) {
        Ok(message) => Ok(message),
        Err(error) => bail!(
            "protocol violation: cannot parse a message: {error}; use the same release of device-ipc on both sides"
        ),
    }
}

impl FromSender {
    /// Receives the text of the descriptor and the process id of the sender.
    pub(crate) fn receive_offer(
        connection: &mut AuthenticatedConnection,
        deadline: Deadline,
    ) -> Result<(String, u32)> {
        let Self::Offer { descriptor, pid } =
            receive(connection, deadline).context("cannot receive the descriptor")?;
        Ok((descriptor, pid))
    }
}
