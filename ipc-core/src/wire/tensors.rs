//! The binary form of tensors and of tables of them. `docs/spec/bundle.md` is the specification; the two change together.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::descriptor::{CHECKSUM_BYTES, Form, Preamble, close, take};
use crate::model::error::{DescriptorError, FormatVersion};
use crate::model::layout::{Dtype, LayoutError, MAX_DIMENSIONS, TensorLayout};
use crate::model::tensor::{
    MAX_TABLE_BYTES, MAX_TENSORS, NamedTensor, RECORD_HEAD_BYTES, SHOWN_BYTES, TensorTable, check_name,
};

const FORM: Form = Form {
    magic: *b"DIPT",
    version: FormatVersion { major: 1, minor: 0 },
    what: "table of tensors",
    most_bytes: MAX_TABLE_BYTES,
    known_flags: 0,
    otherwise: DescriptorError::NotTable,
};

/// The part of fixed size. `IntoBytes` and `Unaligned` prove at compile time that no byte of it is padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct TableHead {
    preamble: Preamble,
    tensors: U32,
}

/// The part of fixed size. `IntoBytes` and `Unaligned` prove at compile time that no byte of it is padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RecordHead {
    name_bytes: U16,
    dtype: u8,
    dimensions: u8,
    /// In bytes.
    place: U64,
    /// In elements.
    offset: U64,
}

/// The least that a tensor takes: no dimensions, and a name of one byte.
pub(crate) const LEAST_RECORD_BYTES: usize = size_of::<RecordHead>() + 1;

const _: () = assert!(size_of::<RecordHead>() == RECORD_HEAD_BYTES);

/// A tensor as it was read: its name is a piece of the bytes.
struct ReadTensor<'a> {
    name: &'a str,
    offset: u64,
    layout: TensorLayout,
}

impl NamedTensor<'_> {
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        let head = RecordHead {
            name_bytes: U16::new(self.name.len() as u16),
            dtype: self.layout.dtype().code(),
            dimensions: self.layout.shape().len() as u8,
            place: U64::new(self.offset),
            offset: U64::new(self.layout.offset()),
        };
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(self.name.as_bytes());
        for number in self.layout.shape().iter().chain(self.layout.strides()) {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
}

impl<'a> ReadTensor<'a> {
    /// Reads one, and passes behind it. The bytes may come from anybody.
    fn read(body: &mut &'a [u8]) -> Result<Self, DescriptorError> {
        let (head, rest) = RecordHead::read_from_prefix(body).map_err(|_| cut_off())?;
        *body = rest;
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
        let numbers = <[U64]>::ref_from_bytes(numbers).map_err(|_| cut_off())?;
        let numbers = numbers.iter().map(|number| number.get());
        let dtype = Dtype::from_code(head.dtype);
        let layout = TensorLayout::from_numbers(dtype, dimensions, numbers, head.offset.get());
        Ok(Self { name, offset: head.place.get(), layout: layout.map_err(senseless)? })
    }
}

impl TensorTable {
    fn encoded_bytes(&self) -> usize {
        let records: usize = self.tensors().map(|tensor| tensor.record_bytes()).sum();
        size_of::<TableHead>() + records + CHECKSUM_BYTES
    }

    /// The binary form; `docs/spec/bundle.md` specifies it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let total = self.encoded_bytes();
        let mut bytes = Vec::with_capacity(total);
        let head = TableHead { preamble: FORM.preamble(0, total), tensors: U32::new(self.len() as u32) };
        bytes.extend_from_slice(head.as_bytes());
        self.tensors().for_each(|tensor| tensor.write(&mut bytes));
        close(&mut bytes);
        bytes
    }

    /// Reads the binary form. The bytes may come from anybody.
    ///
    /// # Errors
    ///
    /// [`DescriptorError`] with what is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let (head, mut body) = FORM.checked_parts::<TableHead>(bytes)?;
        let count = head.tensors.get() as usize;
        let mut table = Self::with_room_for(checked_count(count, body)?);
        for _ in 0..count {
            table.read_one(&mut body)?;
        }
        Ok(table)
    }

    /// Reads one more, and passes behind it. The bytes may come from anybody.
    pub(crate) fn read_one(&mut self, body: &mut &[u8]) -> Result<NamedTensor<'_>, DescriptorError> {
        let ReadTensor { name, offset, layout } = ReadTensor::read(body)?;
        self.push(name, offset, layout)?;
        Ok(self.at(self.len() - 1))
    }
}

/// So many tensors, where there are bytes for them.
pub(crate) fn checked_count(count: usize, body: &[u8]) -> Result<usize, DescriptorError> {
    if count <= MAX_TENSORS && count <= body.len() / LEAST_RECORD_BYTES {
        return Ok(count);
    }
    let why = format!("{count} of them do not fit {} bytes, or are more than {MAX_TENSORS}", body.len());
    Err(DescriptorError::BadField { field: "tensors", why })
}

fn cut_off() -> DescriptorError {
    DescriptorError::BadField { field: "length", why: "its tensors need more bytes than there are".into() }
}
