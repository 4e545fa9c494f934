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
//! | `builder`, `listen`, `local`, `connect`, `name`, `handshake` | connection setup |
//! | `connection`, `progress`, `close` | the state of one end |
//! | `link`, `counters` | the sockets and the counter page that both ends share |
//! | `signals` | the counter that streams signal when tensors are ready |
//! | `message`, `send`, `limits` | sending |
//! | `inbox` | the shared-memory path of small messages |
//! | `room` | the wake-up of a sender at a limit |
//! | `receive`, `receive_wait`, `received`, `arrival` | receiving and opening |
//! | `readiness` | descriptors for event loops |
//! | `maps` | device maps |
//! | `tcp`, `relay`, `relay_handle` | channels between hosts: connection setup, and the two threads that act as the peer |
//!
//! `docs/spec/channel.md` specifies the protocol.

mod arrival;
mod builder;
mod close;
mod connect;
mod connection;
mod counters;
mod guard;
mod handshake;
mod inbox;
#[cfg(all(loom, test))]
mod inbox_loom;
mod limits;
mod link;
mod listen;
mod local;
mod maps;
mod message;
mod name;
mod progress;
#[cfg(test)]
mod properties;
mod readiness;
mod receive;
mod receive_wait;
mod received;
mod relay;
mod relay_handle;
mod room;
mod send;
mod signals;
mod tcp;

pub use builder::ChannelBuilder;
pub use connect::{ConnectBuilder, Connecting};
pub use guard::{Channel, ChannelReceiver, ChannelSender};
pub use listen::{ListenBuilder, Listener};
pub use message::{Message, TrySendError};
pub(crate) use name::listening_names;
pub use received::{Received, ReceivedExport};
