//! The small server inside every exporting process, and its client.

mod address;
mod token;

pub use address::{BrokerAddress, SOCKET_DIR_VARIABLE};
pub(crate) use address::MAX_ADDRESS_BYTES;
pub(crate) use token::Token;
