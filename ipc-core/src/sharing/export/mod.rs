//! The exporter's side: guard, builder, and the table that the broker uses.

mod borrowed;
mod changes;
mod exposure;
mod gather;
mod guard;
mod isolated;
mod owners;
mod prepare;
mod remote_memory;
mod share;
mod share_region;
mod share_tensors;
mod shared;
mod table;
mod tensor_set;

pub use changes::ExportChanges;
pub use exposure::{Exposure, ExposurePolicy};
pub(crate) use guard::still_held;
pub use guard::{Export, HolderPolicy};
pub use share::ShareBuilder;
pub use tensor_set::TensorSet;

pub(crate) use crate::backend::check_backend;
pub(crate) use borrowed::{BorrowedMemory, BorrowedPiece};
pub(crate) use isolated::copy_and_wait;
pub(crate) use remote_memory::RemoteMemory;
pub(crate) use shared::Shared;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use table::NewExport;
pub(crate) use table::{Bearer, ChannelId};
pub(crate) use table::{
    ExportTable, Granted, Importer, LocalGrant, OpenRequest, Readahead, TimelineObserver, stale,
};
