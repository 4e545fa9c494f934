//! Tensor tables: the contents of a buffer that is filled repeatedly.

use super::name::NameIndex;
use super::{
    LayoutError, MAX_TABLE_BYTES, MAX_TENSORS, NamedTensor, TABLE_ENVELOPE_BYTES, TensorLayout, check_name,
};
use crate::model::error::{DescriptorError, Error, Result};

/// Named tensors in one region: the offset of each from the region's start in bytes, and its layout from there.
///
/// A table contains no address and no secret, and opens nothing. It is sent over any transport beside its region: a
/// [`Mapping`](crate::Mapping::tensor_in), or a buffer that is shared once and filled repeatedly, with a table for each
/// filling.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use device_ipc_core::{Dtype, TensorLayout, TensorTable};
///
/// let vector = TensorLayout::contiguous(Dtype::F32, [5])?; // 20 B
/// let table = TensorTable::packed(256, [("a", vector.clone()), ("b", vector)])?; // at multiples of 256 B
/// assert_eq!((table.get("b").map(|(offset, _)| offset), table.region_bytes()), (Some(256), 276));
/// let received = TensorTable::from_bytes(&table.to_bytes())?;
/// assert_eq!(received.len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    /// The concatenated names.
    text: String,
    records: Vec<Record>,
    names: NameIndex,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    /// The range of the name in `names`.
    name: (u32, u32),
    /// The offset in bytes.
    offset: u64,
    layout: TensorLayout,
}

impl Record {
    fn name<'a>(&self, text: &'a str) -> &'a str {
        &text[self.name.0 as usize..self.name.1 as usize]
    }
}

impl PartialEq for TensorTable {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text && self.records == other.records
    }
}

impl Eq for TensorTable {}

impl TensorTable {
    /// Creates a table of names, offsets in bytes and layouts. Tensors may overlap.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`], which names the tensor: for a name that is empty, longer than 1024 bytes or repeated, an end
    /// beyond 64 bits, or a table that exceeds its limits.
    pub fn new<N: AsRef<str>>(tensors: impl IntoIterator<Item = (N, u64, TensorLayout)>) -> Result<Self> {
        let tensors = tensors.into_iter();
        let mut table = Self::with_room_for(tensors.size_hint().0.min(MAX_TENSORS));
        for (name, offset, layout) in tensors {
            table.push(name.as_ref(), offset, layout)?;
        }
        Ok(table.checked()?)
    }

    /// Creates a table with the tensors one after the other, each at a multiple of `align` bytes.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new); [`Error::InvalidRegion`] if the alignment is not a power of two.
    pub fn packed<N: AsRef<str>>(
        align: u64,
        tensors: impl IntoIterator<Item = (N, TensorLayout)>,
    ) -> Result<Self> {
        if !align.is_power_of_two() {
            return Err(Error::InvalidRegion(format!("an alignment of {align} bytes is no power of two")));
        }
        let mut end: u64 = 0;
        let mut packed = Self::default();
        for (name, layout) in tensors {
            let name = name.as_ref();
            let senseless = |cause| DescriptorError::Tensor { name: name.to_owned(), cause };
            let offset =
                end.checked_next_multiple_of(align).ok_or_else(|| senseless(LayoutError::Overflow))?;
            end = NamedTensor { name, offset, layout: &layout }.end().map_err(senseless)?;
            packed.push(name, offset, layout)?;
        }
        Ok(packed.checked()?)
    }

    pub(crate) fn with_room_for(tensors: usize) -> Self {
        Self {
            text: String::new(),
            records: Vec::with_capacity(tensors),
            names: NameIndex::with_room_for(tensors),
        }
    }

    /// Adds a tensor. On error the table is unchanged.
    pub(crate) fn push(
        &mut self,
        name: &str,
        offset: u64,
        layout: TensorLayout,
    ) -> Result<(), DescriptorError> {
        check_name(name)?;
        let tensor = NamedTensor { name, offset, layout: &layout };
        tensor.end().map_err(|cause| tensor.senseless(cause))?;
        let Self { text, records, names } = self;
        if records.len() >= MAX_TENSORS {
            let why = format!("there are more than {MAX_TENSORS}");
            return Err(DescriptorError::BadField { field: "tensors", why });
        }
        let new = records.len() as u32;
        let name_at = |position| if position == new { name } else { records[position as usize].name(text) };
        if !names.insert(new, name_at) {
            return Err(DescriptorError::TensorName {
                name: name.to_owned(),
                why: "another tensor has this name",
            });
        }
        let start = text.len() as u32;
        text.push_str(name);
        records.push(Record { name: (start, text.len() as u32), offset, layout });
        Ok(())
    }

    /// Returns the table, unless its binary form is too large.
    fn checked(self) -> Result<Self, DescriptorError> {
        let found = TABLE_ENVELOPE_BYTES + self.tensors().map(|tensor| tensor.record_bytes()).sum::<usize>();
        if found > MAX_TABLE_BYTES { Err(DescriptorError::TooLarge { found }) } else { Ok(self) }
    }

    /// Returns a table of the first `count` tensors, with the offsets that `offset_of` returns for position and offset.
    pub(crate) fn first(&self, count: usize, offset_of: impl Fn(usize, u64) -> u64) -> Self {
        let mut first = Self::with_room_for(count);
        first.records.extend_from_slice(&self.records[..count]);
        let end = first.records.last().map_or(0, |last| last.name.1 as usize);
        first.text.push_str(&self.text[..end]);
        let Self { text, records, names } = &mut first;
        for (position, record) in records.iter_mut().enumerate() {
            record.offset = offset_of(position, record.offset);
        }
        // All names are different already.
        (0..count as u32).for_each(|position| {
            names.insert(position, |position| records[position as usize].name(text));
        });
        first
    }

    /// Adds a number of bytes to the offset of each tensor, by its position. The caller ensures that its end does not exceed 64
    /// bits.
    pub(crate) fn move_each(&mut self, by: impl Fn(usize) -> u64) {
        self.records.iter_mut().enumerate().for_each(|(position, record)| record.offset += by(position));
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the name, the offset in bytes and the layout of each tensor, in the order of the table.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, u64, &TensorLayout)> {
        self.tensors().map(|tensor| (tensor.name, tensor.offset, tensor.layout))
    }

    /// Returns the offset in bytes and the layout of the tensor of this name.
    pub fn get(&self, name: &str) -> Option<(u64, &TensorLayout)> {
        let tensor = self.at(self.position(name)?);
        Some((tensor.offset, tensor.layout))
    }

    /// Returns the size in bytes that a region needs for all tensors.
    pub fn region_bytes(&self) -> u64 {
        self.tensors().filter_map(|tensor| tensor.end().ok()).max().unwrap_or(0)
    }

    /// Checks that all tensors are inside a region of this size in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`], which names the first tensor that is not.
    pub fn check_fits(&self, region_bytes: u64) -> Result<()> {
        Ok(self.tensors().try_for_each(|tensor| tensor.check_fits(region_bytes))?)
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        let found = self.names.find(name, |position| self.at(position as usize).name)?;
        Some(found as usize)
    }

    /// Returns the [`position`](Self::position), or an error with the known names.
    pub(crate) fn find(&self, name: &str) -> Result<usize> {
        self.position(name).ok_or_else(|| {
            let known = match self.tensors().next() {
                None => "there are none".into(),
                Some(first) => format!("there are {}, the first is {:?}", self.len(), first.name),
            };
            Error::NoSuchTensor { name: name.to_owned(), known }
        })
    }

    pub(crate) fn at(&self, position: usize) -> NamedTensor<'_> {
        self.named(&self.records[position])
    }

    fn named<'a>(&'a self, record: &'a Record) -> NamedTensor<'a> {
        NamedTensor { name: record.name(&self.text), offset: record.offset, layout: &record.layout }
    }

    pub(crate) fn tensors(&self) -> impl ExactSizeIterator<Item = NamedTensor<'_>> {
        self.records.iter().map(|record| self.named(record))
    }
}
