//! The exporter's side: the guard, how it is made, and the table that the broker answers from.

mod borrowed;
mod exposure;
mod guard;
mod share;
mod shared;
mod table;

pub use exposure::{Exposing, Exposure};
pub use guard::{Export, Hanging};
pub(crate) use guard::{Published, close_all, still_held};
pub use share::ShareBuilder;

pub(crate) use borrowed::BorrowedMemory;
pub(crate) use share::{
    check_backend, check_read_only, check_region, copy_and_wait, extents_by_driver, ready_event, stand_in,
};
pub(crate) use shared::{Allocation, Handles, Shared};
pub(crate) use table::{Bearer, ChannelId};
pub(crate) use table::{
    ExportTable, Granted, Importer, LocalGrant, NewExport, OpenRequest, TimelineObserver, stale,
};
