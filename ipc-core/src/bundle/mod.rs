//! Thousands of named tensors in one descriptor: a state dict, handed over at once.
//!
//! An importer asks the exporter's broker once for each home device, however many tensors there are, and the driver opens
//! each allocation once, however many tensors lie in it: the allocations of one device are one export with one lease.
//! Opening is all or nothing.

mod binary;
mod builder;
mod descriptor;
mod draft;
mod export;
mod gather;
mod mapping;
mod open;
mod owners;
#[cfg(test)]
mod properties;
mod tensors;
mod view;

pub use binary::{MAX_BUNDLE_ALLOCATIONS, MAX_BUNDLE_PARTS};
pub use builder::{BundleBuilder, BundleError, MemoryId};
pub use descriptor::{BUNDLE_TEXT_PREFIX, BundleDescriptor};
pub use export::BundleExport;
pub use mapping::BundleMapping;
pub use open::BundleOpenBuilder;
pub use view::BundleView;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use descriptor::{Contents, Part};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use tensors::Tensors;
