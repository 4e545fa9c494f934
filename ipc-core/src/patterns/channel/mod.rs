//! Channels: ordered messages of bytes and device memory between two processes, of one machine or of two hosts.
//!
//! The sender may drop the memory of a message after sending it, the receiver may open it much later, and either process may
//! die. A message therefore contains a *grant* for each of its exports, which keeps the memory allocated until the receiver has
//! opened it, discarded it or terminated. A kernel socket keeps the order and applies back-pressure. Each end distinguishes a
//! closed channel from a peer that died.
//!
//! | file | contents |
//! |---|---|
//! | `listen`, `connect`, `name`, `handshake` | connection setup |
//! | `connection` | the state of one end |
//! | `halves` | the two directions of an end |
//! | `message`, `send`, `limits` | sending |
//! | `inbox` | the shared-memory path of small messages |
//! | `room` | the wake-up of a sender at a limit |
//! | `receive`, `received`, `arrival` | receiving and opening |
//! | `readiness` | descriptors for event loops |
//! | `maps` | device maps |
//! | `tcp`, `relay` | channels between hosts: connection setup, and the two threads that act as the peer |
//!
//! `docs/spec/channel.md` specifies the protocol.

mod arrival;
mod connect;
mod connection;
mod halves;
mod handshake;
mod inbox;
#[cfg(all(loom, test))]
mod inbox_loom;
mod limits;
mod listen;
mod maps;
mod message;
mod name;
#[cfg(test)]
mod properties;
mod readiness;
mod receive;
mod received;
mod relay;
mod room;
mod send;
mod tcp;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

pub use connect::{ConnectBuilder, Connecting};
pub use halves::{ChannelReceiver, ChannelSender};
pub use listen::{ListenBuilder, Listener};
pub use message::{Message, MessageExport, TrySendError};
pub(crate) use name::listening_names;
pub use received::{Received, ReceivedExport};

use crate::model::error::{Error, Result};
use crate::os::process::ProcessIdentity;
use crate::transport::Deadline;
use crate::transport::check_may_wait;
use connection::Connection;

/// Default maximum size of a message in bytes.
const DEFAULT_MESSAGE_LIMIT: u64 = 64 * 1024 * 1024;

/// One end of a channel between two processes of this machine, within one process, or between two hosts
/// ([`Ipc::listen_tcp`](crate::Ipc::listen_tcp)).
///
/// Messages arrive in the order in which they were sent, each exactly once. [`send`](Self::send) waits while the messages in
/// flight, which are sent and not yet received by the peer, reach a limit
/// ([`max_messages_in_flight`](ListenBuilder::max_messages_in_flight),
/// [`max_bytes_in_flight`](ListenBuilder::max_bytes_in_flight)).
///
/// Dropping an end closes the channel: the peer can still receive the messages sent before, and received memory can still be
/// opened.
///
/// # Threads
///
/// Every method takes `&self`, and any thread may call any method at any time. One thread may send while another receives: the
/// two directions share no lock. Several threads may send; each message is sent as a whole. If several threads receive, each
/// message goes to one of them. [`split`](Self::split) gives each direction an owner. [`close`](Self::close) wakes every call
/// that waits, of this process and of the peer. Callbacks of the library may call the `try_` methods only, or pass a timeout of
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
pub struct Channel {
    connection: Arc<Connection>,
    /// Whether the halves close the channel instead of this value.
    is_split: bool,
}

impl Channel {
    const fn new(connection: Arc<Connection>) -> Self {
        Self { connection, is_split: false }
    }

    /// Splits the channel into its two directions, which two threads or tasks can own.
    ///
    /// Each half closes its direction when it is dropped: the peer receives [`Error::ChannelClosed`] after the last message if the
    /// sender was dropped, and cannot send if the receiver was dropped.
    pub fn split(mut self) -> (ChannelSender, ChannelReceiver) {
        self.is_split = true;
        let sender = ChannelSender::new(Arc::clone(&self.connection));
        (sender, ChannelReceiver::new(Arc::clone(&self.connection)))
    }

    /// Sends a message. Waits while the messages in flight leave no room for it.
    ///
    /// When the call returns, the message is in the kernel or in memory that the receiver has mapped, and arrives even if the
    /// channel is dropped. Between hosts it is queued in this process, and a thread of the library sends it. The memory of its tensors belongs to this process and ends with it: call [`close`](Self::close)
    /// before the process exits.
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
        self.connection.send(&message, false, Deadline::after(timeout))
    }

    /// Sends a message if the messages in flight leave room for it, and else returns it; see [`ChannelSender::try_send`].
    ///
    /// # Errors
    ///
    /// [`TrySendError::Full`] with the message; the errors of [`send`](Self::send), except for the timeout.
    pub fn try_send<'m>(&self, message: Message<'m>) -> Result<(), TrySendError<'m>> {
        self.connection.try_send(message, false)
    }

    /// Waits for the next message and returns it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; after the last message, [`Error::ChannelClosed`] if the peer closed the channel, or
    /// [`Error::PeerGone`] if its process terminated without closing it; [`Error::Protocol`] if the peer sends an invalid
    /// message, which ends the channel; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn receive(&self, timeout: Duration) -> Result<Received> {
        check_may_wait("receiving a message", timeout)?;
        self.connection.receive(Deadline::after(timeout))
    }

    /// Returns the next message if it has arrived, and else `None`.
    ///
    /// While another thread waits in [`receive`](Self::receive), that thread receives the message.
    ///
    /// # Errors
    ///
    /// As [`receive`](Self::receive), except for the timeout.
    pub fn try_receive(&self) -> Result<Option<Received>> {
        self.connection.try_receive()
    }

    /// Closes the channel after the peer has received every message, and opened or discarded every tensor in them.
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
        self.connection.close_after(timeout)
    }

    /// Registers a callback that runs once if the peer's process terminates without closing the channel.
    ///
    /// If the process has already terminated, the callback runs immediately. It runs on a thread of the library without a
    /// device context, and does not run after this end was closed. In the callback, calls that wait return
    /// [`Error::OnWorkerThread`].
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.connection.add_callback(Box::new(callback));
    }

    /// Sets whether [`receive`](Self::receive) may spin before it sleeps, by default `true`, and `false` between hosts.
    ///
    /// It spins for 50 µs, or for 200 µs if the peer must wake up first, and rarely if spinning is not successful. Without
    /// spinning, the kernel wakes the thread, which receives the message later but leaves the processor to other threads.
    pub fn set_spinning(&self, spins: bool) {
        self.connection.may_spin.store(spins, std::sync::atomic::Ordering::Relaxed);
    }

    /// Returns the identity of the peer's process.
    pub fn peer(&self) -> &ProcessIdentity {
        &self.connection.peer.process
    }

    /// Returns the peer's program name, as the peer states it; of another host, with the address: `trainer on 10.0.0.2`.
    pub fn program(&self) -> &str {
        &self.connection.peer.program
    }

    /// Returns the maximum size of a message in bytes, the smaller limit of the two ends.
    pub fn message_limit(&self) -> u64 {
        self.connection.limit
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

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.is_split {
            self.connection.close();
        }
    }
}

impl AsFd for Channel {
    /// Returns a descriptor that is readable while [`try_receive`](Self::try_receive) has a result.
    ///
    /// # Panics
    ///
    /// If the process cannot create the descriptor (its limit of open files is reached); [`try_as_fd`](Self::try_as_fd) returns
    /// the error.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.try_as_fd().unwrap_or_else(|error| panic!("{error}; Channel::try_as_fd returns this error"))
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
