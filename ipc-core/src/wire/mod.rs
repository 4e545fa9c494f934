//! Encoders and decoders of descriptors, the broker's protocol and the frames of channels. This layer does no I/O.
//!
//! Every decoder treats its input as hostile.

pub(crate) mod address;
pub(crate) mod channel;
pub(crate) mod descriptor;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), allow(dead_code, reason = "the fuzz targets use a part of them"))]
pub(crate) mod examples;
mod grant;
mod peer_text;
#[cfg(test)]
mod properties;
pub(crate) mod protocol;
mod refusal;
pub(crate) mod relay;
pub(crate) mod remote;
pub(crate) mod ring;
pub(crate) mod text;
mod token;

pub(crate) use address::{BrokerAddress, MAX_ADDRESS_BYTES, SOCKET_DIR_VARIABLE};
pub use grant::Grant;
pub(crate) use grant::GrantExporter;
pub(crate) use peer_text::{short_detail, short_name};
pub(crate) use protocol::{
    AllocationId, LISTED_EXPORTS, LISTED_HOLDERS, LeaseAhead, MAX_HANDLES, MAX_LEASES_AHEAD, MAX_SPANS,
    OpenedExport, Reply, Request, RequestId, Returned, Span, WireHandle,
};
pub use protocol::{ListedExport, ListedHolder};
pub(crate) use refusal::{Failure, Refusal};
pub(crate) use token::{Token, random_bytes};
