//! Fuzzing of the protocol: single messages, and conversations of the exporter's and of the importer's side.
//!
//! The input of a conversation is a script, so that random changes reach many states: steps of two bytes and a packet.

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

/// Decodes a single message of an importer.
pub fn request(bytes: &[u8]) {
    message::<Request>(bytes);
}

/// Decodes a single message of an exporter.
pub fn reply(bytes: &[u8]) {
    message::<Reply>(bytes);
}

/// Checks that a decoded message encodes to an equal one that is not longer (postcard permits padded numbers).
fn message<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Ok(read) = decode::<T>(bytes) else { return };
    let written = encode(&read).expect("it was read from as many bytes");
    assert!(written.len() <= bytes.len());
    let again: T = decode(&written).expect("it was just written");
    assert_eq!(encode(&again).expect("it was just written"), written);
}
