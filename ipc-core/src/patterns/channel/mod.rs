//! Channels: ordered messages of bytes and device memory between two processes, of one machine or of two hosts.
//!
//! The sender may drop the memory of a message after sending it, the receiver may open it much later, and either process may
//! die. A message therefore contains a *grant* for each of its exports, which keeps the memory allocated until the receiver has
//! opened it, discarded it or terminated. A kernel socket keeps the order and applies back-pressure. Each end distinguishes a
//! closed channel from a peer that died.
//!
//! | file | contents |
//! |---|---|
//! | `guard` | the guards of one end |
//! | `builder`, `listen`, `connect`, `name`, `handshake` | connection setup |
//! | `connection` | the state of one end |
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
mod builder;
mod connect;
mod connection;
mod guard;
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

pub use builder::ChannelBuilder;
pub use connect::{ConnectBuilder, Connecting};
pub use guard::{Channel, ChannelReceiver, ChannelSender};
pub use listen::{ListenBuilder, Listener};
pub use message::{Message, TrySendError};
pub(crate) use name::listening_names;
pub use received::{Received, ReceivedExport};
