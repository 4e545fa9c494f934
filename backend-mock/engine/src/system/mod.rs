//! The operating system: processes, descriptors, pages, threads, locks.

mod descriptors;
mod pages;
mod process;
mod signals;
mod sync;

pub(crate) use descriptors::{duplicate, duplicate_from, maximum_descriptors, with_more_descriptors};
pub(crate) use pages::{page_size, whole_pages};
pub(crate) use process::ProcessId;
pub(crate) use signals::spawn_with_signals_blocked;
pub(crate) use sync::lock;
