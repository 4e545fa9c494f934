//! A tensor with a name.

use super::{LayoutError, TensorLayout};
use crate::model::address::DeviceRange;
use crate::model::error::{DescriptorError, Result};

/// Maximum length of a tensor's name in bytes.
pub const MAX_NAME_BYTES: usize = 1024;

/// Maximum number of tensors of a table or an export.
pub const MAX_TENSORS: usize = 1 << 20;

/// Maximum size of a table or of an export's tensors in bytes.
pub const MAX_TABLE_BYTES: usize = 64 * 1024 * 1024;

/// The size of a tensor in the binary form of a table without its name and the numbers of its layout, in bytes.
pub(crate) const RECORD_HEAD_BYTES: usize = 24;

/// The size of the binary form of a table without its tensors, in bytes.
pub(crate) const TABLE_ENVELOPE_BYTES: usize = 28;

/// A tensor with a name. Its layout counts from `offset` bytes after the start of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamedTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) offset: u64,
    pub(crate) layout: &'a TensorLayout,
}

impl NamedTensor<'_> {
    /// Returns the end of the last element, in bytes from the start of the region.
    pub(crate) fn end(&self) -> Result<u64, LayoutError> {
        self.offset.checked_add(self.layout.span_bytes()).ok_or(LayoutError::Overflow)
    }

    /// Checks that the tensor is inside a region of this size in bytes.
    pub(crate) fn check_fits(&self, region_bytes: u64) -> Result<(), DescriptorError> {
        let fits = self.end().and_then(|needed| {
            let too_large = LayoutError::TooLarge { needed, region: region_bytes };
            if needed <= region_bytes { Ok(()) } else { Err(too_large) }
        });
        fits.map_err(|cause| self.senseless(cause))
    }

    /// Returns the range of the tensor in its region, from its first element to the end of its last.
    pub(crate) fn elements_in(&self, region: DeviceRange) -> Result<DeviceRange> {
        self.check_fits(region.len)?;
        let behind = region.slice(self.offset, region.len - self.offset).ok_or(LayoutError::Overflow)?;
        Ok(self.layout.elements_in(behind)?)
    }

    /// Returns the size of the tensor in the binary form of a table, in bytes.
    pub(crate) fn record_bytes(&self) -> usize {
        RECORD_HEAD_BYTES + self.name.len() + self.layout.shape().len() * 16
    }

    pub(crate) fn senseless(&self, cause: LayoutError) -> DescriptorError {
        DescriptorError::Tensor { name: self.name.to_owned(), cause }
    }
}

/// Returns the displayed part of an invalid name.
pub(crate) const SHOWN_BYTES: usize = 64;

pub(crate) fn check_name(name: &str) -> Result<(), DescriptorError> {
    let why = match name.len() {
        0 => "a name has at least one byte",
        1..=MAX_NAME_BYTES => return Ok(()),
        _ => "a name has at most 1024 bytes",
    };
    let shown = name.char_indices().take_while(|(start, _)| *start < SHOWN_BYTES);
    Err(DescriptorError::TensorName { name: shown.map(|(_, character)| character).collect(), why })
}
