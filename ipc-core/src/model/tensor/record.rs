//! A tensor in a table or a bundle, as it travels. `docs/spec/bundle.md` is the specification; the two change together.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Dtype, LayoutError, MAX_DIMENSIONS, TensorLayout};
use crate::wire::descriptor::DescriptorError;

/// The longest name of a tensor in bytes.
pub const MAX_NAME_BYTES: usize = 1024;

/// The most tensors of a table or a bundle.
pub const MAX_TENSORS: usize = 1 << 20;

/// The largest table or bundle in bytes.
pub const MAX_TABLE_BYTES: usize = 64 * 1024 * 1024;

/// The part of fixed size. `IntoBytes` and `Unaligned` prove at compile time that no byte of it is padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    name_bytes: U16,
    dtype: u8,
    dimensions: u8,
    /// In bytes.
    place: U64,
    /// In elements.
    offset: U64,
}

/// The least that a tensor takes: no dimensions, and a name of one byte.
pub(crate) const LEAST_RECORD_BYTES: usize = size_of::<Head>() + 1;

/// A tensor under its name. Its region begins `offset` bytes behind the start of what holds them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamedTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) offset: u64,
    pub(crate) layout: &'a TensorLayout,
}

/// A tensor as it was read: its name is a piece of the bytes.
pub(super) struct ReadTensor<'a> {
    pub(super) name: &'a str,
    pub(super) offset: u64,
    pub(super) layout: TensorLayout,
}

impl NamedTensor<'_> {
    /// The end of the last element, in bytes behind the start of what holds them all.
    pub(crate) fn end(&self) -> Result<u64, LayoutError> {
        self.offset.checked_add(self.layout.span_bytes()?).ok_or(LayoutError::Overflow)
    }

    /// Checks that the tensor lies inside a region of so many bytes.
    pub(crate) fn check_fits(&self, region_bytes: u64) -> Result<(), DescriptorError> {
        let fits = self.end().and_then(|needed| {
            let too_large = LayoutError::TooLarge { needed, region: region_bytes };
            if needed <= region_bytes { Ok(()) } else { Err(too_large) }
        });
        fits.map_err(|cause| self.senseless(cause))
    }

    pub(crate) fn senseless(&self, cause: LayoutError) -> DescriptorError {
        DescriptorError::Tensor { name: self.name.to_owned(), cause }
    }

    /// How many bytes [`write`](Self::write) adds.
    pub(crate) fn record_bytes(&self) -> usize {
        size_of::<Head>() + self.name.len() + self.layout.shape().len() * 16
    }

    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        let head = Head {
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
    pub(super) fn read(body: &mut &'a [u8]) -> Result<Self, DescriptorError> {
        let (head, rest) = Head::read_from_prefix(body).map_err(|_| cut_off())?;
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

/// As much of a bad name as is shown.
const SHOWN_BYTES: usize = 64;

pub(crate) fn check_name(name: &str) -> Result<(), DescriptorError> {
    let why = match name.len() {
        0 => "a name has at least one byte",
        1..=MAX_NAME_BYTES => return Ok(()),
        _ => "a name has at most 1024 bytes",
    };
    let shown = name.char_indices().take_while(|(start, _)| *start < SHOWN_BYTES);
    Err(DescriptorError::TensorName { name: shown.map(|(_, character)| character).collect(), why })
}

fn take<'a>(body: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], DescriptorError> {
    let (taken, rest) = body.split_at_checked(bytes).ok_or_else(cut_off)?;
    *body = rest;
    Ok(taken)
}

fn cut_off() -> DescriptorError {
    DescriptorError::BadField { field: "length", why: "its tensors need more bytes than there are".into() }
}
