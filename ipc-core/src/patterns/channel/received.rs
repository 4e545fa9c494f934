//! What was received.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::arrival::{Arrival, Place};
use super::connection::Connection;
use super::message::Message;
use super::received_bundle::ReceivedBundle;
use crate::backend::Access;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::sharing::import::{HeldGrant, Mapping, OpenBuilder, Staging, is_out_of_reach};
use crate::transport::Deadline;
use crate::wire::channel::Payload;
use crate::wire::descriptor::Descriptor;

/// A message. What it holds and was not opened goes back to the sender when it is dropped, and stays until then also where
/// the channel has been closed.
pub struct Received {
    bytes: Payload,
    pub(super) tensors: Vec<ReceivedTensor>,
    pub(super) bundles: Vec<ReceivedBundle>,
    ready: u64,
    connection: Arc<Connection>,
}

impl Received {
    pub(super) const fn new(connection: Arc<Connection>, bytes: Payload, ready: u64) -> Self {
        Self { bytes, tensors: Vec::new(), bundles: Vec::new(), ready, connection }
    }

    /// The bytes of the message.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    /// The memory that came with it, but for bundles, in the order in which it was added.
    pub fn tensors(&self) -> &[ReceivedTensor] {
        &self.tensors
    }

    /// The bundles that came with it, in the order in which they were added.
    pub fn bundles(&self) -> &[ReceivedBundle] {
        &self.bundles
    }

    /// The tensors that came with it, to be opened when the message has gone. Its bundles are discarded.
    pub fn into_tensors(self) -> Vec<ReceivedTensor> {
        self.tensors
    }

    /// The tensors and the bundles that came with it, to be opened when the message has gone.
    pub fn into_parts(self) -> (Vec<ReceivedTensor>, Vec<ReceivedBundle>) {
        (self.tensors, self.bundles)
    }

    /// Answers over the channel that the message came by. What is sent takes the inverse of the device map that the message
    /// came by, also where this end has a map of its own.
    ///
    /// # Errors
    ///
    /// As [`Channel::send`](crate::Channel::send).
    pub fn reply(&self, message: Message<'_>, timeout: Duration) -> Result<()> {
        self.connection.send(&message, true, Deadline::after(timeout))
    }

    /// Have the tensors been written, or may they still be? A stream that waits for a sender who dies goes on, **also over
    /// memory that was never written**: ask when the work behind the wait has finished, before its result is used.
    ///
    /// # Errors
    ///
    /// [`Error::PeerGone`] where the sender ended before its streams had got there.
    pub fn check(&self) -> Result<()> {
        self.connection.is_ready(self.ready).map(drop)
    }
}

impl fmt::Debug for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensors, bundles) = (self.tensors.len(), self.bundles.len());
        write!(f, "Received({} bytes, {tensors} tensors, {bundles} bundles)", self.bytes().len())
    }
}

/// Memory that came with a message. Dropping it unopened gives it back to the sender.
pub struct ReceivedTensor {
    arrival: Arrival,
    descriptor: Descriptor,
    grant: Option<HeldGrant>,
    place: Place,
}

impl ReceivedTensor {
    pub(super) const fn new(
        arrival: Arrival,
        descriptor: Descriptor,
        grant: Option<HeldGrant>,
        place: Place,
    ) -> Self {
        Self { arrival, descriptor, grant, place }
    }

    /// What names the memory. Others may open it too, as long as the export has not been dropped.
    pub const fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Where the bytes live.
    pub fn home(&self) -> DeviceIdentity {
        self.descriptor.home()
    }

    /// The device of this process that the channel's device map opens it on; `None` where it has none, and the choice is
    /// free.
    pub const fn device(&self) -> Option<DeviceOrdinal> {
        match self.place {
            Place::On(device) => Some(device),
            Place::Anywhere | Place::Nowhere => None,
        }
    }

    /// Opens it, also where the sender has dropped its export since. The grant is used up by the first open that the sender
    /// answers; later ones are those of the plain descriptor.
    pub fn open(&self) -> OpenReceived<'_> {
        OpenReceived {
            tensor: self,
            access: None,
            timeout: self.arrival.connection.ipc.patience(),
            staging: Staging::Never,
        }
    }
}

impl fmt::Debug for ReceivedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedTensor")
            .field("descriptor", &self.descriptor)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

/// A mapping in the making, as [`OpenBuilder`]; see [`ReceivedTensor::open`]. It is made by the method that says where.
#[must_use = "nothing is opened before mapped, at_home, on_device or on"]
#[derive(Debug)]
pub struct OpenReceived<'a> {
    tensor: &'a ReceivedTensor,
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

    /// Opens on the device that the channel's device map says ([`ReceivedTensor::device`]). Waits on the host until the bytes
    /// are ready.
    ///
    /// # Errors
    ///
    /// [`Error::NotInDeviceMap`]; [`Error::InvalidDeviceMap`] where the channel has none; those of
    /// [`on_device`](Self::on_device).
    pub fn mapped(self) -> Result<Mapping> {
        let device = self.tensor.arrival.mapped(self.tensor.place, self.tensor.home())?;
        self.on_device(device)
    }

    /// Opens on the device where the bytes live. Waits on the host until they are ready.
    ///
    /// # Errors
    ///
    /// As [`OpenBuilder::at_home`], and as [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<Mapping> {
        let devices = &self.tensor.arrival.connection.devices;
        if let Some(home) = super::maps::position(devices, self.tensor.home()) {
            self.check_place(home)?;
        }
        self.open(None, |builder| builder.at_home())
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
        self.check_place(device)?;
        self.open(None, |builder| builder.on_device(device))
    }

    /// Opens on the stream's device. The stream waits until the bytes are ready, the host does not.
    ///
    /// # Errors
    ///
    /// As [`OpenBuilder::on`]; [`Error::WrongStream`] where the channel's map says another device than the stream's;
    /// [`Error::PeerGone`] where the sender ended before its streams had written the bytes.
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<Mapping> {
        let (tensor, stream) = (self.tensor, stream.as_stream());
        tensor.arrival.check_stream(tensor.place, tensor.home(), stream)?;
        self.open(Some(stream), |builder| builder.on(&stream))
    }

    fn check_place(&self, device: DeviceOrdinal) -> Result<()> {
        self.tensor.arrival.check_place(self.tensor.place, self.tensor.home(), device)
    }

    fn open(
        &self,
        stream: Option<BorrowedStream<'_>>,
        open: impl Fn(OpenBuilder<'_>) -> Result<Mapping>,
    ) -> Result<Mapping> {
        let deadline = Deadline::after(self.timeout);
        let arrival = &self.tensor.arrival;
        if self.staging != Staging::Always {
            // Before the open, which may use up the grant: what fails here can be tried again.
            let timeout = match stream {
                Some(stream) => arrival.wait_ready_on(stream, deadline).map(|()| self.timeout)?,
                None => arrival.wait_ready(deadline).map(|()| deadline.left())?,
            };
            match self.open_now(timeout, &open) {
                Err(error) if self.needs_copy(&error) => {
                    tracing::debug!(%error, "the memory is copied, as it cannot be opened");
                }
                opened => return opened,
            }
        }
        // The exporter copies at once, whatever a stream of this process waits for.
        arrival.wait_ready(deadline)?;
        self.open_now(self.timeout, |builder| open(builder.staged()))
    }

    fn needs_copy(&self, error: &Error) -> bool {
        self.staging == Staging::IfNeeded && is_out_of_reach(error)
    }

    fn open_now(
        &self,
        timeout: Duration,
        open: impl FnOnce(OpenBuilder<'_>) -> Result<Mapping>,
    ) -> Result<Mapping> {
        let ReceivedTensor { arrival, descriptor, grant, .. } = self.tensor;
        arrival.open(grant.as_slice(), || {
            let builder = OpenBuilder::new(&arrival.connection.ipc, descriptor, timeout);
            let builder = builder.by_grant(grant.as_ref());
            open(match self.access {
                Some(access) => builder.access(access),
                None => builder,
            })
        })
    }
}
