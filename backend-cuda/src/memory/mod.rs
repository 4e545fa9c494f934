//! Device memory: where it comes from, and how each kind of it travels to another process.
//!
//! One file or folder for each kind of handle, with both its export and its import: [`legacy`], [`virtual_memory`],
//! [`pool`], [`fabric`]. Callers state no kind: [`export`] and [`extents`] derive it from the address
//! ([`mod@pointer`], [`source`]), [`open`] from the received handle.

pub(crate) mod allocate;
pub(crate) mod export;
pub(crate) mod extents;
pub(crate) mod fabric;
pub(crate) mod kind;
pub(crate) mod legacy;
pub(crate) mod lookup_cache;
pub(crate) mod open;
pub(crate) mod pointer;
pub(crate) mod pool;
pub(crate) mod received;
pub(crate) mod source;
pub(crate) mod virtual_memory;
