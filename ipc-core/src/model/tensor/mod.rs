//! Tables of named tensors, with the element types and layouts of [`TensorLayout`].
//!
//! This module knows no memory.

mod name;
mod named;
mod table;

pub use crate::model::layout::{Bool, Dtype, Element, LayoutError, MAX_DIMENSIONS, TensorLayout};
pub use named::{MAX_NAME_BYTES, MAX_TABLE_BYTES, MAX_TENSORS};
pub use table::TensorTable;

pub(crate) use crate::model::layout::check_alignment;
pub(crate) use named::{NamedTensor, RECORD_HEAD_BYTES, SHOWN_BYTES, TABLE_ENVELOPE_BYTES, check_name};
