//! Element types, and the layout of a tensor in a region.
//!
//! A layout counts in elements from the start of a region. Every number of it may come from another process, so all arithmetic
//! is checked.

mod bool;
mod dtype;
mod error;
mod gather;
mod numbers;
#[cfg(test)]
mod properties;
mod tensor_layout;

pub use bool::Bool;
pub use dtype::{Dtype, Element};
pub use error::LayoutError;
pub use numbers::MAX_DIMENSIONS;
pub use tensor_layout::TensorLayout;

pub(crate) use tensor_layout::check_alignment;
