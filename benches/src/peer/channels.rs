//! The channels of the peer process.

use std::sync::Arc;

use anyhow::{Context, Result};
use device_ipc::{Buffer, Channel, CopyPolicy, ErrorKind, Export, Ipc, Mapping, Message, Received, Stream};

use crate::wait::TIMEOUT;

/// Opens the tensor of each message, acknowledges it and closes it, until the channel is closed.
pub(super) fn receive(channel: &Channel, spins: bool) -> Result<()> {
    channel.set_spinning(spins);
    while let Some(received) = next(channel)? {
        let mapping = received
            .exports()
            .first()
            .context("protocol violation: a message without a tensor")?
            .open()
            .at_home()?;
        received.reply(Message::new(), TIMEOUT)?;
        drop(mapping);
    }
    Ok(())
}

/// Returns the next message, or `None` if the channel is closed.
pub(super) fn next(channel: &Channel) -> Result<Option<Received>> {
    match channel.receive(TIMEOUT) {
        Ok(received) => Ok(Some(received)),
        Err(error) if error.kind() == ErrorKind::Closed => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// One side of a transport, which copies each received tensor to memory of its device.
pub(crate) struct Transport {
    stream: Stream,
    block: Arc<Buffer>,
    export: Export,
    staged: bool,
}

impl Transport {
    pub(crate) fn new(ipc: &Ipc, device: u32, bytes: u64, staged: bool) -> Result<Self> {
        let block = Arc::new(ipc.allocate(device, bytes)?);
        let export = ipc.share(Arc::clone(&block)).start()?;
        Ok(Self { stream: ipc.create_stream(device)?, block, export, staged })
    }

    /// Returns a message with the tensor of this side, ready when its stream reaches this point.
    pub(crate) fn message(&self) -> Message<'_> {
        Message::new().export(&self.export).ready_on(&self.stream)
    }

    /// Submits the copy of the received tensor.
    pub(crate) fn copy(&self, received: &Received) -> Result<()> {
        let opening =
            received.exports().first().context("protocol violation: a message without a tensor")?.open();
        let opening = if self.staged { opening.copy(CopyPolicy::Staged) } else { opening };
        let mapping: Mapping = opening.timeout(TIMEOUT).on(&self.stream)?;
        let source = mapping.view::<u8, _>(&self.stream)?;
        self.block.view_mut::<u8, _>(&self.stream)?.copy_from_device(&source)?;
        mapping.release(&self.stream)?;
        Ok(())
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Sends back each received tensor, until the channel is closed.
    pub(super) fn serve(&self, channel: &Channel) -> Result<()> {
        while let Some(received) = next(channel)? {
            self.copy(&received)?;
            received.reply(self.message(), TIMEOUT)?;
        }
        Ok(())
    }
}
