//! Which tensors lie where in one region: what a sender says of a bucket that it fills again and again.

use super::name::NameIndex;
use super::{
    LayoutError, MAX_TABLE_BYTES, MAX_TENSORS, NamedTensor, TABLE_ENVELOPE_BYTES, TensorLayout, check_name,
};
use crate::model::error::{DescriptorError, Error, Result};

/// Named tensors in one region: for each its place in bytes from the region's start, and its layout from there on.
///
/// A table holds no address and no secret, and opens nothing. It travels by any road beside the region that it speaks of:
/// a [`Mapping`](crate::Mapping::tensor_in), or a buffer that is shared once and then filled again and again, with a table
/// for each filling.
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    /// The names, one behind the other.
    text: String,
    records: Vec<Record>,
    names: NameIndex,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    /// Where its name begins and ends in the text.
    name: (u32, u32),
    /// The tensor's place in bytes.
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
    /// A table of tensors under their names, each with its place in bytes. They may overlap.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] that names the tensor: a name that is empty, longer than 1024 bytes or given twice, an end that
    /// does not fit 64 bits; or that says what a table has at most.
    pub fn new<N: AsRef<str>>(tensors: impl IntoIterator<Item = (N, u64, TensorLayout)>) -> Result<Self> {
        let tensors = tensors.into_iter();
        let mut table = Self::with_room_for(tensors.size_hint().0.min(MAX_TENSORS));
        for (name, offset, layout) in tensors {
            table.push(name.as_ref(), offset, layout)?;
        }
        Ok(table.checked()?)
    }

    /// A table that lays tensors one behind the other, each at a multiple of `align` bytes, in the order in which they come.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); and [`Error::InvalidRegion`] for an alignment that is no power of two.
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

    /// Adds a tensor. Where that cannot be, the table stays as it was.
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
                why: "another tensor is called so",
            });
        }
        let start = text.len() as u32;
        text.push_str(name);
        records.push(Record { name: (start, text.len() as u32), offset, layout });
        Ok(())
    }

    /// The table, unless its binary form is too large.
    fn checked(self) -> Result<Self, DescriptorError> {
        let found = TABLE_ENVELOPE_BYTES + self.tensors().map(|tensor| tensor.record_bytes()).sum::<usize>();
        if found > MAX_TABLE_BYTES { Err(DescriptorError::TooLarge { found }) } else { Ok(self) }
    }

    /// A table of the first of them, each at the place that `offset_of` says by its position and its place in this table.
    pub(crate) fn first(&self, count: usize, offset_of: impl Fn(usize, u64) -> u64) -> Self {
        let mut first = Self::with_room_for(count);
        first.records.extend_from_slice(&self.records[..count]);
        let end = first.records.last().map_or(0, |last| last.name.1 as usize);
        first.text.push_str(&self.text[..end]);
        let Self { text, records, names } = &mut first;
        for (position, record) in records.iter_mut().enumerate() {
            record.offset = offset_of(position, record.offset);
        }
        // All of them differ.
        (0..count as u32).for_each(|position| {
            names.insert(position, |position| records[position as usize].name(text));
        });
        first
    }

    /// Moves each tensor by so many bytes, by its position. Its end still fits 64 bits, the caller knows.
    pub(crate) fn move_each(&mut self, by: impl Fn(usize) -> u64) {
        self.records.iter_mut().enumerate().for_each(|(position, record)| record.offset += by(position));
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Every tensor in the order of the table: its name, its place in bytes, its layout from there on.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, u64, &TensorLayout)> {
        self.tensors().map(|tensor| (tensor.name, tensor.offset, tensor.layout))
    }

    /// The place in bytes and the layout of the tensor of this name.
    pub fn get(&self, name: &str) -> Option<(u64, &TensorLayout)> {
        let tensor = self.at(self.position(name)?);
        Some((tensor.offset, tensor.layout))
    }

    /// How many bytes a region needs to hold all of them.
    pub fn region_bytes(&self) -> u64 {
        self.tensors().filter_map(|tensor| tensor.end().ok()).max().unwrap_or(0)
    }

    /// Checks that all of them lie in a region of so many bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] that names the first that does not.
    pub fn check_fits(&self, region_bytes: u64) -> Result<()> {
        Ok(self.tensors().try_for_each(|tensor| tensor.check_fits(region_bytes))?)
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        let found = self.names.find(name, |position| self.at(position as usize).name)?;
        Some(found as usize)
    }

    /// As [`position`](Self::position), with an error for those who asked.
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
