//! Received messages and their exports.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::arrival::{Arrival, Place};
use super::connection::Connection;
use super::message::{Message, TrySendError};
use crate::backend::Access;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::sharing::import::{Mapping, OpenBuilder, Staging, UnusedGrant, is_out_of_reach};
use crate::transport::Deadline;
use crate::wire::channel::Payload;
use crate::wire::descriptor::Descriptor;

/// A received message. It owns its contents and may be moved to another thread or task.
///
/// Exports that were not opened are returned to the sender when the message is dropped. They can be opened until then, also
/// after the channel was closed.
pub struct Received {
    bytes: Payload,
    pub(crate) exports: Vec<ReceivedExport>,
    ready: u64,
    connection: Arc<Connection>,
}

impl Received {
    pub(super) const fn new(connection: Arc<Connection>, bytes: Payload, ready: u64) -> Self {
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

/// Memory of a message: one region, or any number of named tensors. Dropping it unopened returns it to the sender.
pub struct ReceivedExport {
    arrival: Arrival,
    descriptor: Descriptor,
    /// One for each home device, or none.
    grants: OneOrMany<UnusedGrant>,
    /// One for each home device.
    places: OneOrMany<Place>,
}

impl ReceivedExport {
    pub(super) const fn new(
        arrival: Arrival,
        descriptor: Descriptor,
        grants: OneOrMany<UnusedGrant>,
        places: OneOrMany<Place>,
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

    /// Returns the device of this process that the channel's device map opens memory of the first home on; `None` where there is
    /// no entry, and the choice is free.
    pub fn device(&self) -> Option<DeviceOrdinal> {
        self.device_for(self.home())
    }

    /// Returns the device of this process that the channel's device map opens memory of this home on.
    pub fn device_for(&self, home: DeviceIdentity) -> Option<DeviceOrdinal> {
        self.homes().find(|(_, known)| *known == home).and_then(|(place, _)| match place {
            Place::On(device) => Some(device),
            Place::Anywhere | Place::Nowhere => None,
        })
    }

    /// Opens it, all of it or nothing, also where the sender has dropped its export since. The grants are used up by the first
    /// open that the sender answers, one for each home device; later opens are those of the plain descriptor.
    pub fn open(&self) -> OpenReceived<'_> {
        OpenReceived {
            export: self,
            access: None,
            timeout: self.arrival.connection.ipc.patience(),
            staging: Staging::Never,
        }
    }

    /// Where the memory of each home may be opened.
    fn homes(&self) -> impl Iterator<Item = (Place, DeviceIdentity)> {
        self.places.iter().copied().zip(self.descriptor.homes())
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

/// Builder of a mapping of a received export, as [`OpenBuilder`]; see [`ReceivedExport::open`]. The method that names the place
/// opens it.
#[must_use = "nothing is opened before mapped, at_home, on_device or on"]
#[derive(Debug)]
pub struct OpenReceived<'a> {
    export: &'a ReceivedExport,
    access: Option<Access>,
    timeout: Duration,
    staging: Staging,
}

impl OpenReceived<'_> {
    /// What this process wants to do with the memory; what the exporter permits unless said otherwise.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// How long the exporter may take to answer, and the bytes to be ready where no stream waits for them.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Takes a copy where the device cannot reach the bytes, as [`OpenBuilder::or_staged`] says. The host waits until the bytes
    /// are ready before they are copied, also where a stream was named.
    pub const fn or_staged(mut self) -> Self {
        self.staging = Staging::IfNeeded;
        self
    }

    /// Takes a copy in any case; see [`or_staged`](Self::or_staged).
    pub const fn staged(mut self) -> Self {
        self.staging = Staging::Always;
        self
    }

    /// Opens each tensor on the device that the channel's device map names ([`ReceivedExport::device_for`]). Waits on the host
    /// until the bytes are ready.
    ///
    /// # Errors
    ///
    /// [`Error::NotInDeviceMap`]; [`Error::InvalidDeviceMap`] where the channel has none; those of
    /// [`on_device`](Self::on_device).
    pub fn mapped(self) -> Result<Mapping> {
        let arrival = &self.export.arrival;
        let devices = self.export.homes().map(|(place, home)| Ok((home, arrival.mapped(place, home)?)));
        let devices: OneOrMany<_> = devices.collect::<Result<_>>()?;
        let device = |home| devices.iter().find(|(known, _)| *known == home).map(|(_, device)| *device);
        self.open(None, |home, _| device(home).ok_or(Error::NotInDeviceMap { home, peer: None }))
    }

    /// Opens each tensor on the device where its bytes live. Waits on the host until they are ready.
    ///
    /// # Errors
    ///
    /// As [`OpenBuilder::at_home`], and as [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<Mapping> {
        let connection = &self.export.arrival.connection;
        for (place, home) in self.export.homes() {
            if let Some(device) = super::maps::position(&connection.devices, home) {
                self.export.arrival.check_place(place, home, device)?;
            }
        }
        let variable = connection.ipc.backend().visible_devices_variable();
        self.open(None, |home, visible| visible.ok_or(Error::HomeNotVisible { home, variable }))
    }

    /// Opens on the device at this position. Waits on the host until the bytes are ready.
    ///
    /// # Errors
    ///
    /// As [`OpenBuilder::on_device`]; [`Error::InvalidDeviceMap`] where the channel's map says another device;
    /// [`Error::PeerGone`] where the sender ended before its streams had written the bytes; [`Error::Timeout`], and the
    /// memory can be opened later.
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<Mapping> {
        let device = device.into();
        for (place, home) in self.export.homes() {
            self.export.arrival.check_place(place, home, device)?;
        }
        self.open(None, |_, _| Ok(device))
    }

    /// Opens on the stream's device. The stream waits until the bytes are ready, the host does not.
    ///
    /// # Errors
    ///
    /// As [`OpenBuilder::on`]; [`Error::WrongStream`] where the channel's map says another device than the stream's;
    /// [`Error::PeerGone`] where the sender ended before its streams had written the bytes.
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<Mapping> {
        let stream = stream.as_stream();
        for (place, home) in self.export.homes() {
            self.export.arrival.check_stream(place, home, stream)?;
        }
        self.open(Some(stream), |_, _| Ok(stream.device()))
    }

    fn open(
        &self,
        stream: Option<BorrowedStream<'_>>,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<Mapping> {
        let deadline = Deadline::after(self.timeout);
        let arrival = &self.export.arrival;
        if self.staging != Staging::Always {
            // Before the open, which may use up the grants: what fails here can be tried again.
            let timeout = match stream {
                Some(stream) => arrival.wait_ready_on(stream, deadline).map(|()| self.timeout)?,
                None => arrival.wait_ready(deadline).map(|()| deadline.left())?,
            };
            match self.open_now(timeout, |builder| builder.open(stream, &place)) {
                Err(error) if self.needs_copy(&error) => {
                    tracing::debug!(target: crate::os::log::CHANNEL, %error, "the memory is copied, as it cannot be opened");
                }
                opened => return opened,
            }
        }
        // The exporter copies at once, whatever a stream of this process waits for.
        arrival.wait_ready(deadline)?;
        self.open_now(self.timeout, |builder| builder.staged().open(stream, &place))
    }

    fn needs_copy(&self, error: &Error) -> bool {
        self.staging == Staging::IfNeeded && is_out_of_reach(error.innermost())
    }

    fn open_now(
        &self,
        timeout: Duration,
        open: impl FnOnce(OpenBuilder<'_>) -> Result<Mapping>,
    ) -> Result<Mapping> {
        let ReceivedExport { arrival, descriptor, grants, .. } = self.export;
        arrival.open(grants, || {
            let builder = OpenBuilder::new(&arrival.connection.ipc, descriptor, timeout).by_grants(grants);
            open(match self.access {
                Some(access) => builder.access(access),
                None => builder,
            })
        })
    }
}
