//! Named tensors in a descriptor, or in a tensor table.

use std::sync::Arc;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::DescriptorError;
use super::envelope::{self, ENVELOPE_BYTES, checked_sections, close};
use super::section::{self, SECTION_HEAD_BYTES, Section, bad, check_end, take, take_head};
use crate::model::layout::{Dtype, LayoutError, MAX_DIMENSIONS, TensorLayout};
use crate::model::tensor::{
    MAX_TENSORS, NamedTensor, RECORD_HEAD_BYTES, SHOWN_BYTES, TABLE_ENVELOPE_BYTES, TensorTable, check_name,
};
use crate::os::Recent;

/// Longer lists are not remembered.
pub(crate) const MOST_REMEMBERED_BYTES: usize = 1 << 20;

/// The part of fixed size. `IntoBytes` and `Unaligned` prove at compile time that it has no padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RecordHead {
    /// The number of the region, over all parts.
    region: U32,
    name_bytes: U16,
    dtype: u8,
    dimensions: u8,
    /// In bytes.
    place: U64,
    /// In elements.
    offset: U64,
}

/// The minimum size of a tensor: no dimensions, and a name of one byte.
const LEAST_RECORD_BYTES: usize = size_of::<RecordHead>() + 1;

const _: () = assert!(size_of::<RecordHead>() == RECORD_HEAD_BYTES);

/// A decoded tensor, whose name borrows the bytes.
struct ReadTensor<'a> {
    region: u32,
    name: &'a str,
    offset: u64,
    layout: TensorLayout,
}

impl NamedTensor<'_> {
    fn write(&self, region: u32, bytes: &mut Vec<u8>) {
        let head = RecordHead {
            region: U32::new(region),
            name_bytes: U16::new(self.name.len() as u16),
            dtype: self.layout.dtype().code(),
            dimensions: self.layout.shape().len() as u8,
            place: U64::new(self.offset),
            offset: U64::new(self.layout.element_offset()),
        };
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(self.name.as_bytes());
        for number in self.layout.shape().iter().chain(self.layout.strides()) {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
}

impl<'a> ReadTensor<'a> {
    /// Decodes a tensor and advances past it. The bytes may come from any process.
    fn read(body: &mut &'a [u8]) -> Result<Self, DescriptorError> {
        let head = take_head::<RecordHead>(body)?;
        let name = take(body, usize::from(head.name_bytes.get()))?;
        let name = str::from_utf8(name).map_err(|_| DescriptorError::TensorName {
            name: String::from_utf8_lossy(&name[..name.len().min(SHOWN_BYTES)]).into_owned(),
            why: "it is no UTF-8",
        })?;
        check_name(name)?;
        let senseless = |cause| DescriptorError::Tensor { name: name.to_owned(), cause };
        let dimensions = usize::from(head.dimensions);
        if dimensions > MAX_DIMENSIONS {
            return Err(senseless(LayoutError::TooManyDimensions(dimensions)));
        }
        let numbers = take(body, dimensions * 16)?;
        let numbers = <[U64]>::ref_from_bytes(numbers).map_err(|_| bad("tensors", "one is cut off"))?;
        let numbers = numbers.iter().map(|number| number.get());
        let dtype = Dtype::from_code(head.dtype);
        let layout = TensorLayout::from_numbers(dtype, dimensions, numbers, head.offset.get());
        Ok(Self {
            region: head.region.get(),
            name,
            offset: head.place.get(),
            layout: layout.map_err(senseless)?,
        })
    }
}

/// All named tensors, with their regions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tensors {
    /// The offset of each tensor counts from the start of the first allocation of its region.
    table: TensorTable,
    /// The region of each tensor, numbered over all parts.
    regions: Vec<u32>,
    /// The binary form, which is compared and sent.
    bytes: Vec<u8>,
}

/// A decoded list, and the sizes of the regions that its tensors were checked against.
struct Read {
    tensors: Arc<Tensors>,
    region_bytes: Vec<u64>,
}

/// The last decoded lists. They contain no secrets, and equal bytes need not be decoded again.
static READ: Recent<Read> = Recent::new();

impl Tensors {
    pub(crate) fn new(table: TensorTable, regions: Vec<u32>) -> Self {
        let mut bytes = Vec::with_capacity(record_bytes(&table));
        for (tensor, region) in table.tensors().zip(&regions) {
            tensor.write(*region, &mut bytes);
        }
        Self { table, regions, bytes }
    }

    pub(crate) const fn table(&self) -> &TensorTable {
        &self.table
    }

    /// Returns the region of each tensor, numbered over all parts.
    pub(crate) fn regions(&self) -> &[u32] {
        &self.regions
    }

    /// Returns the binary form.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the size of the section's body in bytes.
    pub(crate) fn section_bytes(&self) -> usize {
        size_of::<U32>() + self.bytes.len()
    }

    /// Writes the section.
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        section::begin(section::TENSORS, self.section_bytes(), bytes);
        bytes.extend_from_slice(&(self.table.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.bytes);
    }

    /// Decodes the section's body; the regions have these sizes.
    pub(super) fn read(region_bytes: Vec<u64>, body: &mut &[u8]) -> Result<Arc<Self>, DescriptorError> {
        let count = take_head::<U32>(body)?.get() as usize;
        Self::read_or_find(&READ, count, region_bytes, body)
    }

    fn read_or_find(
        recent: &Recent<Read>,
        count: usize,
        region_bytes: Vec<u64>,
        body: &mut &[u8],
    ) -> Result<Arc<Self>, DescriptorError> {
        let is_it = |known: &Read| {
            known.tensors.regions.len() == count
                && body.starts_with(&known.tensors.bytes)
                && known.region_bytes == region_bytes
        };
        if let Some(known) = recent.find(is_it) {
            *body = &body[known.tensors.bytes.len()..];
            return Ok(Arc::clone(&known.tensors));
        }
        let tensors = Arc::new(Self::read_anew(count, &region_bytes, body)?);
        if tensors.bytes.len() <= MOST_REMEMBERED_BYTES {
            recent.remember(Arc::new(Read { tensors: Arc::clone(&tensors), region_bytes }), |_| false);
        }
        Ok(tensors)
    }

    fn read_anew(count: usize, region_bytes: &[u64], body: &mut &[u8]) -> Result<Self, DescriptorError> {
        let begin = *body;
        let count = checked_count(count, body)?;
        let (mut table, mut regions) = (TensorTable::with_room_for(count), Vec::with_capacity(count));
        for _ in 0..count {
            let ReadTensor { region, name, offset, layout } = ReadTensor::read(body)?;
            table.push(name, offset, layout)?;
            let tensor = table.at(table.len() - 1);
            let bytes = *region_bytes.get(region as usize).ok_or_else(|| {
                bad("tensors", &format!("one lies in region {region} of {}", region_bytes.len()))
            })?;
            tensor.check_fits(bytes)?;
            regions.push(region);
        }
        Ok(Self { table, regions, bytes: begin[..begin.len() - body.len()].to_vec() })
    }
}

/// Returns the size of the tensors in the body of their section, in bytes.
pub(crate) fn encoded_bytes(table: &TensorTable) -> usize {
    size_of::<U32>() + record_bytes(table)
}

fn record_bytes(table: &TensorTable) -> usize {
    table.tensors().map(|tensor| tensor.record_bytes()).sum()
}

const _: () = assert!(TABLE_ENVELOPE_BYTES == ENVELOPE_BYTES + SECTION_HEAD_BYTES + size_of::<U32>());

impl TensorTable {
    /// Returns the binary form: a descriptor with the section of tensors only.
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = encoded_bytes(self);
        let mut bytes = envelope::begin(ENVELOPE_BYTES + SECTION_HEAD_BYTES + body);
        section::begin(section::TENSORS, body, &mut bytes);
        bytes.extend_from_slice(&(self.len() as u32).to_le_bytes());
        self.tensors().for_each(|tensor| tensor.write(0, &mut bytes));
        close(&mut bytes);
        bytes
    }

    /// Decodes the binary form. The bytes may come from any process.
    ///
    /// # Errors
    ///
    /// [`DescriptorError`] with the reason.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let mut rest = checked_sections(bytes)?;
        let mut found = None;
        while let Some(section) = Section::next(&mut rest)? {
            match section.kind {
                section::TENSORS if found.is_none() => {
                    let mut body = section.body;
                    let count = take_head::<U32>(&mut body)?.get() as usize;
                    found = Some(Tensors::read_anew(count, &[u64::MAX], &mut body)?.table);
                    check_end(body)?;
                }
                section::EXPORTER..=section::RING => {
                    return Err(bad("sections", "a table of tensors alone has no others"));
                }
                _ => section.skip()?,
            }
        }
        found.ok_or_else(|| bad("sections", "there is no table of tensors"))
    }
}

/// Decodes the number of tensors, and checks that the body is long enough for them.
fn checked_count(count: usize, body: &[u8]) -> Result<usize, DescriptorError> {
    if count <= MAX_TENSORS && count <= body.len() / LEAST_RECORD_BYTES {
        return Ok(count);
    }
    let why = format!("{count} of them do not fit {} bytes, or are more than {MAX_TENSORS}", body.len());
    Err(DescriptorError::BadField { field: "tensors", why })
}

/// Writes the fields of a tensor.
impl PartialEq for Tensors {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Tensors {}

#[cfg(test)]
mod tests;
