//! Copies through host memory, for devices that cannot reach each other.
//!
//! Two devices without peer access, or a device that the importer does not see, share no memory that a driver could map. The
//! importer can request a copy instead ([`OpenBuilder::copy`](crate::OpenBuilder::copy)): the exporter copies to host
//! memory that both processes map, and the importer copies from there to its own device memory. The mapping states that it is a
//! copy.
//!
//! The importer decides which bytes it needs and where they lie in its buffer ([`CopyLayout`]); the exporter checks the request
//! against its regions ([`Segments::requested`]). The bytes of all spans, one span after the other, are divided into chunks. The
//! host memory has two halves ([`Chunks`]): while the importer takes a chunk out of one, the exporter fills the other. The
//! exporter's side ([`Outgoing`]) runs in steps on the worker, none of which waits for a device, under a limit for all of them
//! ([`Stagings`]). `docs/spec/protocol.md` specifies the messages.

mod chunks;
mod layout;
mod limits;
mod local;
mod outgoing;
mod segments;

pub(crate) use chunks::Chunks;
pub(crate) use layout::CopyLayout;
pub use limits::StagingLimits;
pub(crate) use limits::Stagings;
pub(crate) use local::copy_within;
pub(crate) use outgoing::{Outgoing, Refused};
pub(crate) use segments::Segments;
