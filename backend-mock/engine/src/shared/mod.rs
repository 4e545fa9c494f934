//! Objects that processes share: memory files, their header pages, and the handles that name them.

mod event;
mod event_state;
mod handle;
pub(crate) mod node;
mod object;
mod page;

pub(crate) use event::{Event, EventStorage, PendingRecord};
pub use handle::HANDLE_BYTES;
pub(crate) use handle::{Handle, HandleKind};
pub(crate) use object::{Object, refuse_own};
pub(crate) use page::{ExportEpoch, Identity, ObjectKind, Page, SEPARATE_EXPORTS};
