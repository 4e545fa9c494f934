//! Fuzzing of the protocol: conversations of the exporter's and of the importer's side.
//!
//! The input of a conversation is a script, so that random changes reach many states: steps of two bytes and a packet.
//!
//! A module of `ipc-core`, since the model of the exporter looks into a session. Its unit tests compile it, and so does its
//! feature `fuzzing`, which is no part of the public interface.

mod exporter;
mod importer;
mod pages;
mod script;
mod seeds;

pub use exporter::Exporter;
pub use importer::Importer;
pub use pages::{ForeignHandle, HostileExporter, seeds as page_seeds};
pub use seeds::{reply_seeds, request_seeds};

/// A named input from which a target starts.
pub type Seed = (&'static str, Vec<u8>);
