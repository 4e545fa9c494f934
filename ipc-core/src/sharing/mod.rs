//! Exports, leases, the import cache, ready events, timelines and copies through the host; and the one process-wide state.

mod allocate;
pub(crate) mod broker;
pub(crate) mod claims;
pub(crate) mod export;
pub(crate) mod host_pages;
pub(crate) mod import;
mod ipc;
pub(crate) mod lease_page;
mod polled_readiness;
mod pull;
mod recoverable_error;
pub(crate) mod remote;
mod runtime;
pub(crate) mod staging;
pub(crate) mod timeline;

pub(crate) use allocate::allocate;
pub use ipc::Ipc;
pub(crate) use polled_readiness::{PolledReadiness, Watch};
pub use recoverable_error::RecoverableError;
pub(crate) use runtime::{Home, Runtime, RuntimeRef};
