//! Received messages and their exports.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::arrival::{Arrival, OpenDevice};
use super::connection::ChannelConnection;
use super::message::{Message, TrySendError};
use crate::backend::stream::BorrowedStream;
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::model::placement::{DeviceMap, DeviceName};
use crate::sharing::import::{Delivery, OpenBuilder, UnusedGrant};
use crate::transport::Deadline;
use crate::wire::channel::Payload;
use crate::wire::descriptor::Descriptor;

/// A received message. It owns its contents and may be moved to another thread or task.
///
/// Exports that were not opened are returned to the sender when the message is dropped. They can be opened until then, also
/// after the channel was closed.
///
/// # Examples
///
/// ```no_run
/// # use device_ipc_core::{Channel, Message, Result};
/// # fn receive(channel: &Channel, stream: &device_ipc_core::Stream) -> Result<()> {
/// let limit = std::time::Duration::from_secs(10);
/// let received = channel.receive(limit)?;
/// for export in received.exports() {
///     let mapping = export.open().on(stream)?; // the stream waits until the bytes are ready
///     // ... submit work that reads the memory ...
///     mapping.release(stream)?;
/// }
/// received.reply(Message::new().bytes(b"done"), limit)?;
/// # Ok(())
/// # }
/// ```
pub struct Received {
    bytes: Payload,
    pub(crate) exports: Vec<ReceivedExport>,
    ready: u64,
    connection: Arc<ChannelConnection>,
}

impl Received {
    pub(super) const fn new(connection: Arc<ChannelConnection>, bytes: Payload, ready: u64) -> Self {
        Self { bytes, exports: Vec::new(), ready, connection }
    }

    /// Returns the bytes of the message.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    /// Returns the exports of the message, in the order in which they were added.
    pub fn exports(&self) -> &[ReceivedExport] {
        &self.exports
    }

    /// Returns the exports of the message by value.
    pub fn into_exports(self) -> Vec<ReceivedExport> {
        self.exports
    }

    /// Sends an answer over the channel of the message. Its exports use the inverse of the device map of the message, also if
    /// this end has a map.
    ///
    /// # Errors
    ///
    /// As [`Channel::send`](crate::Channel::send).
    pub fn reply(&self, message: Message<'_>, timeout: Duration) -> Result<()> {
        self.connection.send(&message, true, Deadline::after(timeout))
    }

    /// Sends an answer, as [`reply`](Self::reply), if the messages in flight leave room for it, and else returns it.
    ///
    /// # Errors
    ///
    /// As [`ChannelSender::try_send`](crate::ChannelSender::try_send).
    pub fn try_reply<'m>(&self, message: Message<'m>) -> Result<(), TrySendError<'m>> {
        self.connection.try_send(message, true)
    }

    /// Checks that the sender's streams have written the tensors, or still may.
    ///
    /// A stream that waits for a sender that terminates continues, **also over memory that was never written**: call this method
    /// when the work behind the wait is complete, before its result is used.
    ///
    /// # Errors
    ///
    /// [`Error::PeerGone`] if the sender terminated before its streams reached that point.
    pub fn check(&self) -> Result<()> {
        self.connection.is_ready(self.ready).map(drop)
    }
}

impl fmt::Debug for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Received({} bytes, {} exports)", self.bytes().len(), self.exports.len())
    }
}

/// Memory of a message: one region, or any number of named tensors. Dropping it unopened returns it to the sender. See the example of
/// [`Received`].
pub struct ReceivedExport {
    arrival: Arrival,
    descriptor: Descriptor,
    /// One for each home device, or none.
    grants: OneOrMany<UnusedGrant>,
    /// One for each home device.
    places: OneOrMany<OpenDevice>,
}

impl ReceivedExport {
    pub(super) const fn new(
        arrival: Arrival,
        descriptor: Descriptor,
        grants: OneOrMany<UnusedGrant>,
        places: OneOrMany<OpenDevice>,
    ) -> Self {
        Self { arrival, descriptor, grants, places }
    }

    /// Returns the descriptor of the memory. Other processes may open it too, as long as the export has not been dropped.
    pub const fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Returns the device where the bytes live, the first of several.
    pub fn home(&self) -> DeviceIdentity {
        self.descriptor.home()
    }

    /// Returns the device of this process that the channel's device map names for the first [home](Self::home); `None` if there
    /// is no entry, and the choice is free.
    pub fn device(&self) -> Option<DeviceOrdinal> {
        self.homes().next().and_then(|(place, _)| place.device())
    }

    /// Returns the channel's device map for this export: the device of this process for each home device. It is empty if the
    /// channel has no map, or the memory belongs to this process. See
    /// [`OpenBuilder::on_mapped_devices`](crate::OpenBuilder::on_mapped_devices).
    pub fn device_map(&self) -> DeviceMap {
        let pair = |(place, home): (OpenDevice, _)| Some((DeviceName::from(home), place.device()?.into()));
        DeviceMap::of_pairs(self.homes().filter_map(pair).collect())
    }

    /// Opens the export, also after the sender has dropped it.
    pub fn open(&self) -> OpenBuilder<'_> {
        let ipc = &self.arrival.connection.ipc;
        OpenBuilder::new(ipc, &self.descriptor, ipc.timeout()).by_grants(&self.grants).delivered_by(self)
    }

    /// Where the memory of each home may be opened.
    fn homes(&self) -> impl Iterator<Item = (OpenDevice, DeviceIdentity)> {
        self.places.iter().copied().zip(self.descriptor.homes())
    }
}

impl Delivery for ReceivedExport {
    fn check_device(
        &self,
        home: DeviceIdentity,
        device: DeviceOrdinal,
        stream: Option<BorrowedStream<'_>>,
    ) -> Result<()> {
        let place = self.homes().find(|(_, known)| *known == home).map(|(place, _)| place);
        match (place, stream) {
            (Some(OpenDevice::On(expected)), Some(stream)) if expected != device => {
                let (stream, what) = (stream.device(), "the channel's device map");
                Err(Error::WrongStream { stream, what, expected })
            }
            (Some(OpenDevice::On(expected)), _) if expected != device => {
                Err(Error::InvalidDeviceMap(format!(
                    "the channel's map opens this memory on device {expected}, not on device {device}; open it by \
                 on_mapped_devices(&export.device_map()), or remove the pair from the map"
                )))
            }
            (Some(OpenDevice::Nowhere), _) => {
                Err(Error::NotInDeviceMap { home, peer: Some(self.arrival.connection.peer.to_string()) })
            }
            _ => Ok(()),
        }
    }

    fn wait_ready(&self, stream: Option<BorrowedStream<'_>>, deadline: Deadline) -> Result<()> {
        match stream {
            Some(stream) => self.arrival.wait_ready_on(stream, deadline),
            None => self.arrival.wait_ready(deadline),
        }
    }

    fn open(&self, open: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.arrival.open(&self.grants, open)
    }
}

impl fmt::Debug for ReceivedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedExport")
            .field("descriptor", &self.descriptor)
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}
