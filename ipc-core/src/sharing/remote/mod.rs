//! Copies between hosts: the exporter's server, and the importer's pull.
//!
//! Memory of another host cannot be opened, only copied, and this library moves no bytes itself: a
//! [transfer engine](crate::backend::engine) does. The library decides who may copy, and keeps memory allocated as long as an
//! engine uses it. The importer connects by TCP to an address of the descriptor; both sides prove that they know the export's token. The
//! exporter grants a lease and sends the engine's metadata of its regions. The importer pulls the bytes into a buffer of its own, states meanwhile
//! that it still reads, and releases the lease. It keeps the connection for some seconds, for the next copy of the same export. A reader
//! of a ring keeps its lease, and pulls each publication.
//! `docs/spec/remote.md` specifies the messages.

mod control;
mod idle;
mod incoming;
mod lease;
mod pull_in;
mod ring_in;
mod ring_out;
mod serve;
mod served;
mod settings;

pub(crate) use idle::IdleConnections;
pub(crate) use incoming::IncomingPull;
pub(crate) use pull_in::{pull_in, pull_into};
pub(crate) use ring_in::{RemoteRing, RingMessage, SlotPull};
pub use settings::Remote;
