//! What is said of memory that holds tensors: element types, layouts, and tables of named tensors.
//!
//! Plain data: nothing here knows where the memory is. A layout counts in elements from the start of a region, and every
//! number of it may come from another process, so all arithmetic is checked.

mod dtype;
mod error;
mod layout;
mod name;
mod numbers;
mod record;
mod table;

pub use dtype::{Dtype, Element};
pub use error::LayoutError;
pub use layout::{MAX_DIMENSIONS, TensorLayout};
pub use record::{MAX_NAME_BYTES, MAX_TABLE_BYTES, MAX_TENSORS};
pub use table::TensorTable;

pub(crate) use layout::check_alignment;
pub(crate) use record::{NamedTensor, check_name};
pub(crate) use table::checked_count;
