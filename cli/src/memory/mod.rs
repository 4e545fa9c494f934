//! What the commands do with device memory: values of any element type, and bytes in pieces of a bounded size.

mod bytes;
mod opened;
mod summary;
mod values;

pub(crate) use bytes::DeviceBytes;
pub(crate) use opened::{Opened, Place};
pub(crate) use summary::Summary;
pub(crate) use values::{add_to_bytes, bytes_of_value, dtype_of_name};

use std::ops::Range;

use anyhow::{Context, Result};
use device_ipc::TensorLayout;

/// Where the elements of a tensor without gaps lie in its region, in bytes; `None` where it has gaps.
pub(crate) fn element_bytes(layout: &TensorLayout) -> Result<Option<Range<u64>>> {
    if !layout.is_contiguous() {
        return Ok(None);
    }
    let element = layout.dtype().bytes().context("a type of elements that this version does not know")?;
    let end = layout.span_bytes()?;
    let len = layout.elements().checked_mul(element).context("more bytes than there can be")?;
    Ok(Some(end.saturating_sub(len)..end))
}
