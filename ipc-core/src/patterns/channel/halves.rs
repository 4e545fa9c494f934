//! The two directions of an end of a channel, which two threads or tasks can own.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use super::connection::{Connection, Direction};
use super::message::{Message, TrySendError};
use super::received::Received;
use crate::model::error::{Error, Result};
use crate::os::process::ProcessIdentity;
use crate::transport::{Deadline, check_may_wait};

/// The sending direction of a [`Channel`](crate::Channel); see [`Channel::split`](crate::Channel::split).
///
/// Clones send over the same channel. When the last clone is dropped, the peer receives [`Error::ChannelClosed`] after the last
/// message; the receiver of this process can still receive.
///
/// The descriptor ([`AsFd`]) tells when a full channel has room: it becomes readable after [`try_send`](Self::try_send) has
/// returned [`TrySendError::Full`] and the peer has received enough, and when the channel ends. It is not readable before the
/// first `try_send` that found the channel full, so try first, then wait. One event loop may wait for it; threads that wait in
/// [`send`](Self::send) of the same channel meanwhile may take its wake-up.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use device_ipc_core::{Ipc, Message, TrySendError};
///
/// let ipc = Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// let timeout = Duration::from_secs(10);
/// let listener = ipc.listen("example-split").max_messages_in_flight(1).start()?;
/// # let connecting = std::thread::spawn({ let ipc = ipc.clone(); move || ipc.connect("example-split").start() });
/// let (sender, receiver) = listener.accept(timeout)?.split();
/// # let peer = connecting.join().expect("no panic")?;
/// assert!(receiver.try_receive()?.is_none());
/// sender.send(Message::new().bytes(b"one"), timeout)?;
/// // The peer has not received the first message.
/// let full = sender.try_send(Message::new().bytes(b"two"));
/// assert!(matches!(full, Err(TrySendError::Full(message)) if message.payload() == b"two"));
/// # drop(peer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ChannelSender {
    half: Arc<SendHalf>,
}

#[derive(Debug)]
struct SendHalf(Arc<Connection>);

impl Drop for SendHalf {
    fn drop(&mut self) {
        self.0.close_direction(Direction::Sending);
    }
}

impl ChannelSender {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { half: Arc::new(SendHalf(connection)) }
    }

    fn connection(&self) -> &Arc<Connection> {
        &self.half.0
    }

    /// Sends a message, as [`Channel::send`](crate::Channel::send) does.
    ///
    /// # Errors
    ///
    /// As [`Channel::send`](crate::Channel::send).
    pub fn send(&self, message: Message<'_>, timeout: Duration) -> Result<()> {
        self.connection().send(&message, false, Deadline::after(timeout))
    }

    /// Sends a message if the messages in flight leave room for it, and else returns it.
    ///
    /// Does not wait for the peer. If the message has [`ready_on`](Message::ready_on) streams of a device without timelines, the
    /// host waits for these.
    ///
    /// # Errors
    ///
    /// [`TrySendError::Full`] with the message; the errors of [`send`](Self::send), except for the timeout.
    pub fn try_send<'m>(&self, message: Message<'m>) -> Result<(), TrySendError<'m>> {
        self.connection().try_send(message, false)
    }

    /// Closes the channel in both directions; see [`Channel::close`](crate::Channel::close).
    ///
    /// # Errors
    ///
    /// As [`Channel::close`](crate::Channel::close).
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.connection().close_after(timeout)
    }

    /// Returns the identity of the peer's process.
    pub fn peer(&self) -> &ProcessIdentity {
        &self.connection().peer.process
    }

    /// Returns the maximum size of a message in bytes, the smaller limit of the two ends.
    pub fn message_limit(&self) -> u64 {
        self.connection().limit
    }

    /// Returns the descriptor of [`AsFd`], which the first call creates, or an error if there is none left.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the process cannot create a descriptor (its limit of open files is reached). A later call tries again.
    pub fn try_as_fd(&self) -> Result<BorrowedFd<'_>> {
        self.connection().sender_descriptor()
    }
}

impl AsFd for ChannelSender {
    /// Returns a descriptor that becomes readable when a full channel has room.
    ///
    /// # Panics
    ///
    /// If the process cannot create the descriptor (its limit of open files is reached); [`try_as_fd`](Self::try_as_fd) returns
    /// the error.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.try_as_fd()
            .unwrap_or_else(|error| panic!("{error}; ChannelSender::try_as_fd returns this error"))
    }
}

impl AsRawFd for ChannelSender {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// The receiving direction of a [`Channel`](crate::Channel); see [`Channel::split`](crate::Channel::split).
///
/// When it is dropped, unreceived messages are discarded, and the peer can no longer send; the sender of this process can still
/// send. The descriptor ([`AsFd`]) is that of the channel: readable while [`try_receive`](Self::try_receive) has a result.
#[derive(Debug)]
pub struct ChannelReceiver {
    connection: Arc<Connection>,
}

impl ChannelReceiver {
    pub(super) const fn new(connection: Arc<Connection>) -> Self {
        Self { connection }
    }

    /// Waits for the next message and returns it.
    ///
    /// # Errors
    ///
    /// As [`Channel::receive`](crate::Channel::receive).
    pub fn receive(&self, timeout: Duration) -> Result<Received> {
        check_may_wait("receiving a message", timeout)?;
        self.connection.receive(Deadline::after(timeout))
    }

    /// Returns the next message if it has arrived, and else `None`.
    ///
    /// # Errors
    ///
    /// As [`Channel::try_receive`](crate::Channel::try_receive).
    pub fn try_receive(&self) -> Result<Option<Received>> {
        self.connection.try_receive()
    }

    /// Closes the channel in both directions; see [`Channel::close`](crate::Channel::close).
    ///
    /// # Errors
    ///
    /// As [`Channel::close`](crate::Channel::close).
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.connection.close_after(timeout)
    }

    /// Registers a callback for the termination of the peer; see [`Channel::on_gone`](crate::Channel::on_gone).
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.connection.add_callback(Box::new(callback));
    }

    /// Sets whether [`receive`](Self::receive) may spin; see [`Channel::set_spinning`](crate::Channel::set_spinning).
    pub fn set_spinning(&self, spins: bool) {
        self.connection.may_spin.store(spins, std::sync::atomic::Ordering::Relaxed);
    }

    /// Returns the identity of the peer's process.
    pub fn peer(&self) -> &ProcessIdentity {
        &self.connection.peer.process
    }

    /// Returns the descriptor of [`AsFd`], which the first call creates, or an error if there is none left.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the process cannot create a descriptor (its limit of open files is reached). A later call tries again.
    pub fn try_as_fd(&self) -> Result<BorrowedFd<'_>> {
        self.connection.receiver_descriptor()
    }
}

impl Drop for ChannelReceiver {
    fn drop(&mut self) {
        self.connection.close_direction(Direction::Receiving);
    }
}

impl AsFd for ChannelReceiver {
    /// Returns a descriptor that is readable while [`try_receive`](Self::try_receive) has a result.
    ///
    /// # Panics
    ///
    /// If the process cannot create the descriptor (its limit of open files is reached); [`try_as_fd`](Self::try_as_fd) returns
    /// the error.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.try_as_fd()
            .unwrap_or_else(|error| panic!("{error}; ChannelReceiver::try_as_fd returns this error"))
    }
}

impl AsRawFd for ChannelReceiver {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
