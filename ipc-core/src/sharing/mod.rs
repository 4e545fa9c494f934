//! Exports, leases, the import cache, ready events, timelines and copies through the host; and the one process-wide state.

mod error_with;
pub(crate) mod export;
pub(crate) mod host_pages;
pub(crate) mod import;
mod runtime;
mod session;
pub(crate) mod staging;
pub(crate) mod timeline;

pub use error_with::ErrorWith;
pub(crate) use runtime::Runtime;
pub(crate) use session::Session;
