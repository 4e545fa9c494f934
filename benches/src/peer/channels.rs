//! What the second process does with what comes over a channel.

use std::sync::Arc;

use anyhow::{Context, Result};
use device_ipc::{Buffer, Channel, Error, Export, Ipc, Mapping, Message, Received, Stream};

use crate::wait::TIMEOUT;

/// Opens what each message holds, acknowledges it, and lets it go, until the channel is closed.
pub(super) fn receive(channel: &Channel, spins: bool) -> Result<()> {
    channel.set_spinning(spins);
    while let Some(received) = next(channel)? {
        let mapping = received.tensors().first().context("a message without a tensor")?.open().at_home()?;
        received.reply(Message::new(), TIMEOUT)?;
        drop(mapping);
    }
    Ok(())
}

/// The next message, until the channel is closed.
fn next(channel: &Channel) -> Result<Option<Received>> {
    match channel.receive(TIMEOUT) {
        Ok(received) => Ok(Some(received)),
        Err(Error::ChannelClosed { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// One end of a transport: what comes is copied to memory of the own device.
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

    /// The own memory, ready when the own stream gets here.
    pub(crate) fn message(&self) -> Message<'_> {
        Message::new().tensor(&self.export).ready_on(&self.stream)
    }

    /// Submits the copy of what has come.
    pub(crate) fn take(&self, received: &Received) -> Result<()> {
        let opening = received.tensors().first().context("a message without a tensor")?.open();
        let opening = if self.staged { opening.staged() } else { opening };
        let mapping: Mapping = opening.timeout(TIMEOUT).on(&self.stream)?;
        let source = mapping.view::<u8, _>(&self.stream)?;
        self.block.view_mut::<u8>(&self.stream)?.copy_from_device(&source)?;
        mapping.release(&self.stream)?;
        Ok(())
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Sends back what comes, until the channel is closed.
    pub(super) fn serve(&self, channel: &Channel) -> Result<()> {
        while let Some(received) = next(channel)? {
            self.take(&received)?;
            received.reply(self.message(), TIMEOUT)?;
        }
        Ok(())
    }
}
