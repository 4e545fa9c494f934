//! What is said of memory that holds tensors: element types, layouts, and tables of named tensors.
//!
//! Plain data: nothing here knows where the memory is. A layout counts in elements from the start of a region, and every
//! number of it may come from another process, so all arithmetic is checked.

mod dtype;
mod error;
mod layout;

pub use dtype::{Dtype, Element};
pub use error::LayoutError;
pub use layout::{MAX_DIMENSIONS, TensorLayout};
