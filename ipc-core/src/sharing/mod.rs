//! Exports, leases, the import cache, ready events, timelines and copies through the host; and the one process-wide state.

pub(crate) mod bundle;
pub(crate) mod export;
pub(crate) mod host_pages;
pub(crate) mod import;
pub(crate) mod recent;
mod runtime;
pub(crate) mod staging;
pub(crate) mod timeline;

pub(crate) use runtime::Runtime;
