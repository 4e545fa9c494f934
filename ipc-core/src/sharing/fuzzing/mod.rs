//! Fuzzing of the protocol: single messages, and whole conversations with the exporter's and the importer's side.
//!
//! A conversation's input is a script, so that chance finds its way through the states: steps of two bytes and a packet,
//! one after the other.

mod exporter;
mod importer;
mod pages;
mod script;
mod seeds;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::wire::protocol::{Reply, Request, decode, encode};

pub use exporter::Exporter;
pub use importer::Importer;
pub use pages::{ForeignHandle, HostileExporter};

pub(crate) use pages::seeds as page_seeds;
pub(crate) use seeds::{reply_seeds, request_seeds};

/// A single message from an importer.
pub fn request(bytes: &[u8]) {
    message::<Request>(bytes);
}

/// A single message from an exporter.
pub fn reply(bytes: &[u8]) {
    message::<Reply>(bytes);
}

/// What can be read is written so that it reads the same, and no longer than it came (postcard passes over zeros at the
/// end of a number).
fn message<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Ok(read) = decode::<T>(bytes) else { return };
    let written = encode(&read).expect("it was read from as many bytes");
    assert!(written.len() <= bytes.len());
    let again: T = decode(&written).expect("it was just written");
    assert_eq!(encode(&again).expect("it was just written"), written);
}
