//! Exports, leases, the import cache, ready events, timelines and copies through the host; and the one process-wide state.

pub(crate) mod broker;
mod error_with;
pub(crate) mod export;
pub(crate) mod host_pages;
pub(crate) mod import;
mod ipc;
pub(crate) mod lease_page;
mod polled_readiness;
mod pull;
pub(crate) mod remote;
mod runtime;
pub(crate) mod staging;
pub(crate) mod timeline;

pub use error_with::ErrorWith;
pub use ipc::Ipc;
pub(crate) use polled_readiness::{PolledReadiness, Watch};
pub(crate) use runtime::{Home, Runtime, RuntimeRef};
