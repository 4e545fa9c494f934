//! What was received.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::connection::{Connection, Slot};
use super::message::Message;
use super::wire::Payload;
use crate::backend::Access;
use crate::broker::Deadline;
use crate::descriptor::Descriptor;
use crate::device::{DeviceIdentity, DeviceOrdinal};
use crate::error::{Error, Result};
use crate::export::check_backend;
use crate::import::{HeldGrant, Mapping, OpenBuilder};
use crate::kill::kill_point;
use crate::stream::AsStream;

/// A message. What it holds and was not opened goes back to the sender when it is dropped, and stays until then also where
/// the channel has been closed.
pub struct Received {
    bytes: Payload,
    tensors: Vec<ReceivedTensor>,
    ready: u64,
    connection: Arc<Connection>,
}

impl Received {
    pub(super) const fn new(
        connection: Arc<Connection>,
        bytes: Payload,
        tensors: Vec<ReceivedTensor>,
        ready: u64,
    ) -> Self {
        Self { bytes, tensors, ready, connection }
    }

    /// The bytes of the message.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    /// The memory that came with it, in the order in which it was added.
    pub fn tensors(&self) -> &[ReceivedTensor] {
        &self.tensors
    }

    /// The memory that came with it, to be opened when the message has gone.
    pub fn into_tensors(self) -> Vec<ReceivedTensor> {
        self.tensors
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
        write!(f, "Received({} bytes, {} tensors)", self.bytes().len(), self.tensors.len())
    }
}

/// Where memory may be opened.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// There is no map, or it is this process's own.
    Anywhere,
    /// Where the map says.
    On(DeviceOrdinal),
    /// There is a map, and it says nothing.
    Nowhere,
}

/// Memory that came with a message. Dropping it unopened gives it back to the sender.
pub struct ReceivedTensor {
    connection: Arc<Connection>,
    descriptor: Descriptor,
    grant: Option<HeldGrant>,
    ready: u64,
    place: Place,
    /// Whoever opens it, so that a grant is shown once.
    opening: Mutex<()>,
    settled: AtomicBool,
}

impl ReceivedTensor {
    pub(super) const fn new(
        connection: Arc<Connection>,
        descriptor: Descriptor,
        grant: Option<HeldGrant>,
        ready: u64,
        place: Place,
    ) -> Self {
        let (opening, settled) = (Mutex::new(()), AtomicBool::new(false));
        Self { connection, descriptor, grant, ready, place, opening, settled }
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
        OpenReceived { tensor: self, access: None, timeout: self.connection.ipc.patience() }
    }

    /// The memory is held by a lease, or has gone back.
    fn settle(&self) {
        if self.connection.owner.is_here() && !self.settled.swap(true, Ordering::AcqRel) {
            self.connection.own_word(Slot::Settled).fetch_add(1, Ordering::AcqRel);
        }
    }

    fn check_place(&self, wanted: DeviceOrdinal) -> Result<()> {
        match self.place {
            Place::Anywhere => Ok(()),
            Place::On(device) if device == wanted => Ok(()),
            Place::On(device) => Err(Error::InvalidDeviceMap(format!(
                "the channel's map opens this memory on device {device}, and device {wanted} was asked for; call mapped, \
                 or take the pair out of the map"
            ))),
            Place::Nowhere => Err(self.not_in_the_map()),
        }
    }

    fn not_in_the_map(&self) -> Error {
        let peer = &self.connection.peer;
        Error::NotInDeviceMap {
            home: self.home(),
            peer: Some(format!("process {} ({})", peer.pid, peer.program)),
        }
    }
}

impl Drop for ReceivedTensor {
    fn drop(&mut self) {
        if !self.settled.load(Ordering::Acquire) {
            kill_point!("receiver:discarding");
        }
        self.settle();
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

    /// Opens on the device that the channel's device map says ([`ReceivedTensor::device`]). Waits on the host until the bytes
    /// are ready.
    ///
    /// # Errors
    ///
    /// [`Error::NotInDeviceMap`]; [`Error::InvalidDeviceMap`] where the channel has none; those of
    /// [`on_device`](Self::on_device).
    pub fn mapped(self) -> Result<Mapping> {
        match self.tensor.place {
            Place::On(device) => self.on_device(device),
            Place::Nowhere => Err(self.tensor.not_in_the_map()),
            Place::Anywhere => Err(Error::InvalidDeviceMap(
                "the channel has none for this memory; give one to device_map where the channel is made, or say where with \
                 at_home, on_device or on"
                    .into(),
            )),
        }
    }

    /// Opens on the device where the bytes live. Waits on the host until they are ready.
    ///
    /// # Errors
    ///
    /// As [`OpenBuilder::at_home`], and as [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<Mapping> {
        if let Some(home) = super::maps::position(&self.tensor.connection.devices, self.tensor.home()) {
            self.tensor.check_place(home)?;
        }
        self.open_when_ready(|builder| builder.at_home())
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
        self.tensor.check_place(device)?;
        self.open_when_ready(|builder| builder.on_device(device))
    }

    /// Opens on the stream's device. The stream waits until the bytes are ready, the host does not.
    ///
    /// # Errors
    ///
    /// As [`OpenBuilder::on`]; [`Error::WrongStream`] where the channel's map says another device than the stream's;
    /// [`Error::PeerGone`] where the sender ended before its streams had written the bytes.
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<Mapping> {
        let borrowed = stream.as_stream();
        let (tensor, connection) = (self.tensor, &self.tensor.connection);
        check_backend("the stream", borrowed.backend(), connection.ipc.backend().info().name)?;
        match tensor.place {
            Place::On(expected) if expected != borrowed.device() => {
                let (stream, what) = (borrowed.device(), "the channel's device map");
                return Err(Error::WrongStream { stream, what, expected });
            }
            Place::Nowhere => return Err(tensor.not_in_the_map()),
            Place::On(_) | Place::Anywhere => {}
        }
        // Before the open, which may use up the grant: what fails here can be tried again.
        connection.wait_ready_on(tensor.ready, borrowed, Deadline::after(self.timeout))?;
        let timeout = self.timeout;
        self.open(timeout, |builder| builder.on(&borrowed))
    }

    fn open_when_ready(self, open: impl FnOnce(OpenBuilder<'_>) -> Result<Mapping>) -> Result<Mapping> {
        let deadline = Deadline::after(self.timeout);
        self.tensor.connection.wait_ready(self.tensor.ready, deadline)?;
        self.open(deadline.left(), open)
    }

    fn open(
        self,
        timeout: Duration,
        open: impl FnOnce(OpenBuilder<'_>) -> Result<Mapping>,
    ) -> Result<Mapping> {
        let tensor = self.tensor;
        tensor.connection.owner.check()?;
        let _opening = tensor.opening.lock().unwrap_or_else(PoisonError::into_inner);
        kill_point!("receiver:opening");
        let builder = OpenBuilder::new(&tensor.connection.ipc, &tensor.descriptor, timeout);
        let builder = builder.by_grant(tensor.grant.as_ref());
        let opened = open(match self.access {
            Some(access) => builder.access(access),
            None => builder,
        });
        kill_point!("receiver:opened");
        let used = tensor.grant.as_ref().is_some_and(|grant| grant.token().is_none());
        if opened.is_ok() || used {
            tensor.settle();
        }
        opened
    }
}
