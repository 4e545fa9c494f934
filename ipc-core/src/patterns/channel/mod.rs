//! Channels: ordered messages between two processes of a machine, of bytes and of device memory.
//!
//! Whoever puts tensors into a queue means them to arrive: the sender may drop what it has sent, the receiver may take its
//! time, and either may die. A message therefore holds a *grant* of each export in it, which keeps the memory until the
//! receiver has opened it, discarded it, or gone; a kernel socket keeps the order and pushes back; and the ends tell a
//! channel that was closed from a process that died.
//!
//! | file | what it is |
//! |---|---|
//! | `listen`, `connect`, `name`, `handshake` | how two ends find each other and agree |
//! | `connection` | one end, and what it knows of the other |
//! | `message`, `send`, `wire` | what is sent |
//! | `inbox` | by which way small messages go |
//! | `receive`, `received`, `received_bundle`, `arrival` | what is received, and how it is opened |
//! | `maps` | on which device |
//!
//! `docs/spec/channel.md` specifies what travels.

mod arrival;
mod connect;
mod connection;
mod handshake;
mod inbox;
#[cfg(all(loom, test))]
mod inbox_loom;
mod listen;
mod maps;
mod message;
mod name;
#[cfg(test)]
mod properties;
mod receive;
mod received;
mod send;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;

use std::sync::Arc;
use std::time::Duration;

pub use connect::ConnectBuilder;
pub use listen::{ListenBuilder, Listener};
pub use message::Message;
pub use received::{OpenReceived, Received, ReceivedExport};

use crate::model::error::{Error, Result};
use crate::os::process::ProcessIdentity;
use crate::transport::Deadline;
use crate::transport::check_may_wait;
use connection::Connection;

/// The largest message in bytes, unless said otherwise.
const DEFAULT_MESSAGE_LIMIT: u64 = 64 * 1024 * 1024;

/// One end of a channel between two processes of this machine, or within one.
///
/// Messages come in the order in which they were sent, each once. One thread may send while another receives; the thread that
/// receives does the reading. A receiver that does not read makes [`send`](Self::send) wait.
///
/// Dropping it closes the channel: what has been sent can still be received, and what has been received can still be opened.
///
/// # Examples
///
/// Both ends in one process, on the mock; they are the same between two.
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
///         let weights = message.tensors()[0].open().on(&stream)?; // the stream waits until they are written
///         let read = weights.view::<f32, _>(&stream)?.to_vec()?;
///         message.check()?; // the sender did not die over it
///         message.reply(Message::new().bytes(b"thanks"), timeout)?;
///         Ok(read)
///     }
/// });
///
/// let channel = listener.accept(timeout)?;
/// let stream = ipc.create_stream(0)?;
/// let memory = ipc.allocate(0, 16)?;
/// memory.view_mut::<f32>(&stream)?.copy_from(&[1.0, 2.0, 3.0, 4.0])?;
/// let weights = ipc.share(memory).shape([4]).dtype(device_ipc_core::Dtype::F32).start()?;
/// channel.send(Message::new().bytes(b"weights").tensor(&weights).ready_on(&stream), timeout)?;
/// drop(weights); // the message keeps them
/// assert_eq!(channel.receive(timeout)?.bytes(), b"thanks");
/// channel.close(timeout)?;
/// assert_eq!(reader.join().expect("no panic")?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Channel {
    connection: Arc<Connection>,
}

impl Channel {
    const fn new(connection: Arc<Connection>) -> Self {
        Self { connection }
    }

    /// Sends a message, waiting for room in the queue. When this returns, the message is in the hands of the kernel, or in
    /// memory that the receiver has mapped: it arrives also where the channel is dropped then. What its tensors name lives in this process, and ends with it: call
    /// [`close`](Self::close) before the process ends.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] where the receiver does not read; [`Error::MessageTooLarge`]; [`Error::NotInDeviceMap`], with the
    /// device and the call that helps; [`Error::ExportDropped`] for an export that has been shut down;
    /// [`Error::ChannelClosed`] or [`Error::PeerGone`] where nobody receives any longer; [`Error::Forked`]. In all cases
    /// nothing of the message has been sent, and the next send is as good as this one would have been.
    pub fn send(&self, message: Message<'_>, timeout: Duration) -> Result<()> {
        self.connection.send(&message, false, Deadline::after(timeout))
    }

    /// The next message, waiting for one.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; once everything has been received that was sent before, [`Error::ChannelClosed`] where the other
    /// end was closed, and [`Error::PeerGone`] where its process has ended without; [`Error::Protocol`] where it sends what
    /// is no message, and then the channel has ended; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn receive(&self, timeout: Duration) -> Result<Received> {
        check_may_wait("Channel::receive", timeout)?;
        self.connection.receive(Deadline::after(timeout))
    }

    /// Waits until the other end has received every message, and opened or discarded every tensor in them, and closes the
    /// channel. After that this process may end.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], which says how much was taken; [`Error::OnWorkerThread`] in a callback; [`Error::PeerGone`] or [`Error::ChannelClosed`] where it will not
    /// take the rest. The channel is closed all the same.
    pub fn close(self, timeout: Duration) -> Result<()> {
        check_may_wait("Channel::close", timeout)?;
        self.connection.wait_taken(Deadline::after(timeout))
    }

    /// Has `callback` run, once, when the other process ends without having closed the channel; at once where it has already.
    /// It runs on a thread of the library, without a device's context, and not at all once this end has been closed. Calls that
    /// wait are refused there ([`Error::OnWorkerThread`]).
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        if self.connection.owner.is_here() {
            self.connection.on_gone(Box::new(callback));
        }
    }

    /// May [`receive`](Self::receive) spin before it sleeps, for some tens of microseconds, or for two hundred where the other
    /// end has to wake first? It may unless said otherwise, and does so seldom where that is in vain. A thread that is woken by
    /// the kernel has the message later, and the processor is free until then.
    pub fn set_spinning(&self, spins: bool) {
        self.connection.may_spin.store(spins, std::sync::atomic::Ordering::Relaxed);
    }

    /// The process at the other end.
    pub fn peer(&self) -> &ProcessIdentity {
        &self.connection.peer.process
    }

    /// The program at the other end, as it calls itself.
    pub fn program(&self) -> &str {
        &self.connection.peer.program
    }

    /// The largest message that both ends take, in bytes.
    pub fn message_limit(&self) -> u64 {
        self.connection.limit
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.connection.close();
    }
}
