//! Device memory: allocations, and how each kind of memory travels to another process.
//!
//! One folder for each kind of handle, with both its export and its import: [`key`], [`shareable`]. [`export`],
//! [`extent`] and [`open`] dispatch to them.

pub(crate) mod access;
pub(crate) mod allocate;
pub(crate) mod allocations;
pub(crate) mod attributes;
pub(crate) mod copies;
pub(crate) mod export;
pub(crate) mod extent;
pub(crate) mod imports;
pub(crate) mod key;
pub(crate) mod kind;
pub(crate) mod listing;
pub(crate) mod open;
pub(crate) mod options;
pub(crate) mod physical;
pub(crate) mod received;
pub(crate) mod shareable;
pub(crate) mod state;
pub(crate) mod wire;
