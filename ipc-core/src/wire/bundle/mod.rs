//! The descriptor of a bundle.

mod binary;
mod descriptor;
#[cfg(test)]
mod properties;
mod tensors;
mod view;

pub(crate) use binary::encoded_bytes;
pub use binary::{MAX_BUNDLE_ALLOCATIONS, MAX_BUNDLE_PARTS};
pub use descriptor::{BUNDLE_TEXT_PREFIX, BundleDescriptor};
pub(crate) use descriptor::{Contents, Part};
pub(crate) use tensors::{MOST_REMEMBERED_BYTES, Tensors, encoded_bytes as encoded_tensor_bytes};
pub use view::BundleView;
