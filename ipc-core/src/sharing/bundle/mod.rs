//! Thousands of named tensors in one descriptor: a state dict, handed over at once.
//!
//! An importer asks the exporter's broker once for each home device, however many tensors there are, and the driver opens
//! each allocation once, however many tensors lie in it: the allocations of one device are one export with one lease.
//! Opening is all or nothing.

mod builder;
mod draft;
mod export;
mod gather;
mod mapping;
mod open;
mod owners;

pub use builder::{BundleBuilder, MemoryId};
pub(crate) use draft::Draft;
pub use export::BundleExport;
pub use mapping::BundleMapping;
pub use open::BundleOpenBuilder;
