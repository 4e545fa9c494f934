//! Copies through host memory, for devices that cannot reach each other.
//!
//! Two cards without peer access, or a card that the importer does not see, share nothing that a driver could map. What
//! can be done is to copy: the exporter to host memory that both processes have, the importer from there to memory of its
//! own. Nobody gets that without having asked for it ([`OpenBuilder::or_staged`](crate::OpenBuilder::or_staged)), and the
//! mapping says that it is a copy.
//!
//! The host memory has two halves ([`Chunks`]): while the importer takes a chunk out of one, the exporter fills the other.
//! The exporter's side ([`Outgoing`]) runs in steps on the worker, none of which waits for a device, under a limit for all
//! of them ([`Stagings`]). The messages stand in `docs/spec/protocol.md`.

mod chunks;
mod limits;
mod local;
mod outgoing;

pub(crate) use chunks::Chunks;
pub use limits::StagingLimits;
pub(crate) use limits::Stagings;
pub(crate) use local::copy_within;
pub(crate) use outgoing::{Outgoing, Refused};
