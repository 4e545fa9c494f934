//! The guards of an end of a channel: both directions, or one of them, which two threads or tasks can own.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use super::connection::ChannelConnection;
use super::counters::{BOTH, Direction};
use super::message::{Message, TrySendError};
use super::received::Received;
use crate::model::error::{Error, Result};
use crate::os::process::ProcessIdentity;
use crate::transport::{Deadline, check_may_wait};

/// One end of a channel between two processes of this machine, within one process, or between two hosts
/// ([`Ipc::listen_tcp`](crate::Ipc::listen_tcp)).
///
/// Messages arrive in the order in which they were sent, each exactly once. [`send`](Self::send) waits while the messages in
/// flight, which are sent and not yet received by the peer, reach a limit
/// ([`max_messages_in_flight`](crate::ListenBuilder::max_messages_in_flight),
/// [`max_bytes_in_flight`](crate::ListenBuilder::max_bytes_in_flight)).
///
/// Dropping an end closes the channel: the peer can still receive the messages sent before, and received memory can still be
/// opened.
///
/// # Threads
///
/// Every method takes `&self`, and any thread may call any method at any time. One thread may send while another receives: the
/// two directions share no lock. Several threads may send; each message is sent as a whole. If several threads receive, each
/// message goes to one of them. [`split`](Self::split) gives each direction an owner: [`ChannelSender`] and [`ChannelReceiver`]
/// are this type with one direction. [`close`](Self::close) wakes every call that waits, of this process and of the peer. Callbacks of the library may call the `try_` methods only, or pass a timeout of
/// zero.
///
/// # Event loops
///
/// The descriptor ([`AsFd`]) is readable while [`try_receive`](Self::try_receive) has a result, which includes the end of the
/// channel: it stays readable until the method returns `None`. It can be registered with epoll, with mio, or with tokio as
/// `AsyncFd`. Nothing may read from it or write to it. A task that is cancelled between the readiness and `try_receive` loses
/// nothing. From the first use of the descriptor on, every message makes a system call on either side; a channel that is only
/// used by threads passes small messages through shared memory.
///
/// # Examples
///
/// Both ends in one process on the mock; two processes use the same calls.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use device_ipc_core::{Ipc, Message};
///
/// let ipc = Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=2")?);
/// let listener = ipc.listen("trainer").start()?;
/// let timeout = Duration::from_secs(10);
///
/// let reader = std::thread::spawn({
///     let ipc = ipc.clone();
///     move || -> Result<Vec<f32>, device_ipc_core::Error> {
///         let channel = ipc.connect("trainer").timeout(timeout).start()?;
///         let stream = ipc.create_stream(0)?;
///         let message = channel.receive(timeout)?;
///         assert_eq!(message.bytes(), b"weights");
///         let weights = message.exports()[0].open().on(&stream)?; // the stream waits until they are written
///         let read = weights.view(&stream)?.to_vec()?;
///         message.check()?; // the sender did not die before writing them
///         message.reply(Message::new().bytes(b"thanks"), timeout)?;
///         Ok(read)
///     }
/// });
///
/// let channel = listener.accept(timeout)?;
/// let stream = ipc.create_stream(0)?;
/// let memory = ipc.allocate(0, 16)?;
/// memory.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0, 3.0, 4.0])?;
/// let weights = ipc.share(memory).shape([4]).dtype(device_ipc_core::Dtype::F32).start()?;
/// channel.send(Message::new().bytes(b"weights").export(&weights).ready_on(&stream), timeout)?;
/// drop(weights); // the message keeps the memory allocated
/// assert_eq!(channel.receive(timeout)?.bytes(), b"thanks");
/// channel.close(timeout)?;
/// assert_eq!(reader.join().expect("no panic")?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Channel<const SENDS: bool = true, const RECEIVES: bool = true> {
    guard: Arc<CloseGuard>,
}

/// The sending direction of a [`Channel`]; see [`Channel::split`].
///
/// Clones send over the same channel. When the last clone is dropped, the peer receives [`Error::ChannelClosed`] after the last
/// message; the receiver of this process can still receive.
///
/// The descriptor ([`AsFd`]) tells when a full channel has room: it becomes readable after [`try_send`](Channel::try_send) has
/// returned [`TrySendError::Full`] and the peer has received enough, and when the channel ends. It is not readable before the
/// first `try_send` that found the channel full, so try first, then wait. One event loop may wait for it; threads that wait in
/// [`send`](Channel::send) of the same channel meanwhile may take its wake-up.
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
pub type ChannelSender = Channel<true, false>;

/// The receiving direction of a [`Channel`]; see [`Channel::split`].
///
/// When it is dropped, unreceived messages are discarded, and the peer can no longer send; the sender of this process can still
/// send. The descriptor ([`AsFd`]) is that of the channel: readable while [`try_receive`](Channel::try_receive) has a result.
pub type ChannelReceiver = Channel<false, true>;

/// Closes directions of a connection when it is dropped.
#[derive(Debug)]
struct CloseGuard {
    connection: Arc<ChannelConnection>,
    directions: u64,
}

impl Drop for CloseGuard {
    fn drop(&mut self) {
        self.connection.close(self.directions);
    }
}

impl Channel {
    pub(super) fn new(connection: Arc<ChannelConnection>) -> Self {
        Self { guard: Arc::new(CloseGuard { connection, directions: BOTH }) }
    }

    /// Splits the channel into its two directions, which two threads or tasks can own.
    ///
    /// Each half closes its direction when it is dropped: the peer receives [`Error::ChannelClosed`] after the last message if the
    /// sender was dropped, and cannot send if the receiver was dropped.
    pub fn split(self) -> (ChannelSender, ChannelReceiver) {
        let mut whole = Arc::into_inner(self.guard).expect("only senders are cloned");
        whole.directions = 0;
        let half = |direction: Direction| {
            Arc::new(CloseGuard { connection: Arc::clone(&whole.connection), directions: direction as u64 })
        };
        (Channel { guard: half(Direction::Sending) }, Channel { guard: half(Direction::Receiving) })
    }
}

impl<const RECEIVES: bool> Channel<true, RECEIVES> {
    /// Sends a message. Waits while the messages in flight leave no room for it.
    ///
    /// When the call returns, the message is in the kernel or in memory that the receiver has mapped, and arrives even if the
    /// channel is dropped. Between hosts it is queued in this process, and a thread of the library sends it. The memory of its
    /// tensors belongs to this process and ends with it: call [`close`](Self::close) before the process exits.
    ///
    /// If both processes only send, both wait until their timeouts: receive in another thread.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if the receiver does not receive earlier messages; [`Error::MessageTooLarge`];
    /// [`Error::NotInDeviceMap`] with the device and a remedy; [`Error::ExportDropped`] for an export that was shut down;
    /// [`Error::ChannelClosed`] or [`Error::PeerGone`] if the peer no longer receives; [`Error::Forked`]. After an error, no part
    /// of the message has been sent, and the channel can send further messages.
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

    /// Hands a file over to the peer, a process of this machine.
    pub(crate) fn send_file(&self, file: BorrowedFd<'_>) -> Result<()> {
        self.connection().send_file(file)
    }
}

impl<const SENDS: bool> Channel<SENDS, true> {
    /// Waits for the next message and returns it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; after the last message, [`Error::ChannelClosed`] if the peer closed the channel, or
    /// [`Error::PeerGone`] if its process terminated without closing it; [`Error::Protocol`] if the peer sends an invalid
    /// message, which ends the channel; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn receive(&self, timeout: Duration) -> Result<Received> {
        check_may_wait("receiving a message", timeout)?;
        self.connection().receive(Deadline::after(timeout))
    }

    /// Returns the next message if it has arrived, and else `None`.
    ///
    /// While another thread waits in [`receive`](Self::receive), that thread receives the message.
    ///
    /// # Errors
    ///
    /// As [`receive`](Self::receive), except for the timeout.
    pub fn try_receive(&self) -> Result<Option<Received>> {
        self.connection().try_receive()
    }

    /// Sets whether [`receive`](Self::receive) may spin before it sleeps, by default `true`, and `false` between hosts.
    ///
    /// It spins for 50 µs, or for 200 µs if the peer must wake up first, and rarely if spinning is not successful. Without
    /// spinning, the kernel wakes the thread, which receives the message later but leaves the processor to other threads.
    pub fn set_spinning(&self, spins: bool) {
        self.connection().spinning.permit(spins);
    }

    /// Waits for the next file that the peer hands over.
    pub(crate) fn take_file(&self, deadline: Deadline) -> Result<OwnedFd> {
        self.connection().take_file(deadline)
    }
}

impl<const SENDS: bool, const RECEIVES: bool> Channel<SENDS, RECEIVES> {
    pub(super) fn connection(&self) -> &Arc<ChannelConnection> {
        &self.guard.connection
    }

    /// Closes the channel, in both directions, after the peer has received every message, and opened or discarded every tensor
    /// in them.
    ///
    /// After that this process may exit. Wakes the calls of all threads that wait for this channel, which return
    /// [`Error::ChannelClosed`]. A timeout of zero closes the channel at once. A closed channel stays closed, and a second call
    /// returns `Ok`.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], which states how much was received; [`Error::OnWorkerThread`] in a callback; [`Error::PeerGone`] or
    /// [`Error::ChannelClosed`] if the peer will not receive the rest. The channel is closed nevertheless.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.connection().close_after(timeout)
    }

    /// Registers a callback that runs once if the peer's process terminates without closing the channel.
    ///
    /// If the process has already terminated, the callback runs immediately. It runs on a thread of the library without a
    /// device context, and does not run after this end was closed. In the callback, calls that wait return
    /// [`Error::OnWorkerThread`].
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.connection().on_gone(Box::new(callback));
    }

    /// Returns the identity of the peer's process.
    pub fn peer(&self) -> &ProcessIdentity {
        &self.connection().peer.process
    }

    /// Returns the peer's program name, as the peer states it; of another host, with the address: `trainer on 10.0.0.2`.
    pub fn program(&self) -> &str {
        self.connection().peer.program()
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
        if RECEIVES { self.connection().receiver_descriptor() } else { self.connection().sender_descriptor() }
    }
}

impl Clone for ChannelSender {
    fn clone(&self) -> Self {
        Self { guard: Arc::clone(&self.guard) }
    }
}

impl<const SENDS: bool, const RECEIVES: bool> AsFd for Channel<SENDS, RECEIVES> {
    /// Returns a descriptor that is readable while [`try_receive`](Channel::try_receive) has a result; of a [`ChannelSender`], one
    /// that becomes readable when a full channel has room.
    ///
    /// # Panics
    ///
    /// If the process cannot create the descriptor (its limit of open files is reached); [`try_as_fd`](Self::try_as_fd) returns
    /// the error.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.try_as_fd().unwrap_or_else(|error| panic!("{error}; Channel::try_as_fd returns this error"))
    }
}

impl<const SENDS: bool, const RECEIVES: bool> AsRawFd for Channel<SENDS, RECEIVES> {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
