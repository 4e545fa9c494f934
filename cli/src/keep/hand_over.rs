//! Handing a name over from one keeper process to the next, without a moment in which the weights are gone or the name is free.
//!
//! The two speak over a channel that only processes of the keeper's own user can connect to:
//!
//! 1. The keeper sends its export with its version ([`offer`]). It continues to answer.
//! 2. The successor has weights of its own, and sends [`READY`].
//! 3. The keeper sends its two listening sockets, and [`RELEASED`]. Processes that look for the name wait.
//! 4. The successor answers to the name, and sends [`DONE`].
//! 5. The keeper drops its export, which notifies its readers, and exits when the last of them has released it.
//!
//! If the successor fails before 4, the keeper, which has the sockets still, answers again.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use device_ipc::front_end::list_keepers;
use device_ipc::{AllowList, Channel, Error, Export, Ipc, Message, ReceivedExport};

use super::serve::Names;
use super::weights;

/// The successor has its weights.
pub(super) const READY: &[u8] = b"ready";
/// The sockets of the names are on their way.
const RELEASED: &[u8] = b"released";
/// The successor answers to the name.
const DONE: &[u8] = b"done";

/// Timeout of each step that waits for no device work.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the name of the channel on which a keeper is asked to hand over.
pub(super) fn channel_name(name: &str) -> String {
    format!("keeper-control.{name}")
}

/// Returns an entry point of the same backend that permits no other user.
pub(super) fn own_user_only(ipc: &Ipc) -> Result<Ipc> {
    Ok(Ipc::builder().allow(AllowList::own_user()).with_backend(std::sync::Arc::clone(ipc.backend())))
}

/// Sends the weights and their version to a process that may become the successor.
pub(super) fn offer(channel: &Channel, version: u64, export: &Export) -> Result<(), Error> {
    Ok(channel.try_send(Message::new().bytes(version.to_string().into_bytes()).export(export))?)
}

/// Sends the names to a successor that is ready, and waits until it answers to them.
pub(super) fn release(names: &Names, successor: &Channel) -> Result<()> {
    names.keeper.hand_over(successor)?;
    names.control.hand_over(successor)?;
    successor.send(Message::new().bytes(RELEASED), STEP_TIMEOUT)?;
    let answer = successor.receive(STEP_TIMEOUT)?;
    if answer.bytes() != DONE {
        bail!("it sent a message that this version of the program does not know");
    }
    Ok(())
}

/// The keeper that runs under the name.
pub(super) struct Predecessor {
    channel: Channel,
    version: u64,
    export: ReceivedExport,
}

/// The channel to a predecessor that has sent its names.
pub(super) struct Taking(Channel);

/// Connects to the keeper of a name; `None` if there is none and none is needed.
pub(super) fn connect(
    ipc: &Ipc,
    name: &str,
    timeout: Duration,
    is_optional: bool,
) -> Result<Option<Predecessor>> {
    let ipc = own_user_only(ipc)?;
    let channel = channel_name(name);
    let user = rustix::process::geteuid().as_raw();
    if is_optional && !list_keepers(None)?.iter().any(|keeper| keeper.user == user && keeper.name == name) {
        return Ok(None);
    }
    let channel = match ipc.connect(&channel).timeout(timeout).start() {
        Ok(channel) => channel,
        Err(Error::NoListener { .. }) => {
            bail!("--hand-over: no keeper of {name:?} runs as this user; name the files to load")
        }
        Err(error) => return Err(super::explain(error, name)),
    };
    let offer = channel.receive(timeout).context("the running keeper has sent no offer")?;
    let version = std::str::from_utf8(offer.bytes()).ok().and_then(|version| version.parse().ok());
    let export = offer.into_exports().pop();
    let (Some(version), Some(export)) = (version, export) else {
        bail!("process {} sent an offer that this version of the program does not know", channel.peer().pid);
    };
    Ok(Some(Predecessor { channel, version, export }))
}

impl Predecessor {
    pub(super) const fn version(&self) -> u64 {
        self.version
    }

    /// Copies the weights on their devices.
    pub(super) fn copy(&self, ipc: &Ipc) -> Result<Export> {
        let mapping =
            self.export.open().at_home().context("cannot open the weights of the running keeper")?;
        let export = weights::copy(ipc, &mapping)?;
        let stream = ipc.create_stream(mapping.device())?;
        mapping.release(&stream).map_err(Error::from)?;
        Ok(export)
    }

    /// Has the predecessor send its names.
    pub(super) fn release_name(self) -> Result<Taking> {
        let Self { channel, export, .. } = self;
        drop(export);
        channel.send(Message::new().bytes(READY), STEP_TIMEOUT)?;
        let answer =
            channel.receive(STEP_TIMEOUT).context("the running keeper has not handed its name over")?;
        if answer.bytes() != RELEASED {
            bail!("the running keeper refused: {}", String::from_utf8_lossy(answer.bytes()));
        }
        Ok(Taking(channel))
    }
}

impl Taking {
    /// Answers to the names.
    pub(super) fn take(&self, ipc: &Ipc, name: &str, version: u64, export: Export) -> Result<Names> {
        let keeper = ipc.take_over(&self.0, name, version, export).map_err(Error::from)?;
        let control = own_user_only(ipc)?.listen(&channel_name(name)).take_over(&self.0)?;
        Ok(Names { keeper, control })
    }

    /// Has the predecessor end.
    pub(super) fn finish(self) -> Result<()> {
        self.0.send(Message::new().bytes(DONE), STEP_TIMEOUT)?;
        // Until the message has been received: the predecessor answers again when the channel breaks before.
        Ok(self.0.close(STEP_TIMEOUT)?)
    }
}
