//! Sections: the typed, length-checked pieces of a descriptor.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::DescriptorError;

pub(super) const EXPORTER: u16 = 1;
pub(super) const REGIONS: u16 = 2;
pub(super) const REGION: u16 = 3;
pub(super) const LAYOUT: u16 = 4;
pub(super) const TENSORS: u16 = 5;
pub(super) const RING: u16 = 6;
/// Addresses for copies over a network. Not critical: a reader that cannot use them opens the memory on its host all the same.
pub(super) const NETWORK: u16 = 7;

/// A reader that does not know this section must refuse the descriptor.
const CRITICAL: u16 = 1 << 0;

/// The fields before the body of each section.
pub(super) const SECTION_HEAD_BYTES: usize = size_of::<SectionHead>();

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SectionHead {
    kind: U16,
    flags: U16,
    bytes: U32,
}

/// A decoded section.
pub(super) struct Section<'a> {
    pub(super) kind: u16,
    pub(super) body: &'a [u8],
    is_critical: bool,
}

impl<'a> Section<'a> {
    /// Removes the next section from `rest`.
    pub(super) fn next(rest: &mut &'a [u8]) -> Result<Option<Self>, DescriptorError> {
        if rest.is_empty() {
            return Ok(None);
        }
        let (head, behind) = SectionHead::ref_from_prefix(rest).map_err(|_| cut_off())?;
        let (body, behind) = behind.split_at_checked(head.bytes.get() as usize).ok_or_else(cut_off)?;
        *rest = behind;
        let is_critical = head.flags.get() & CRITICAL != 0;
        Ok(Some(Self { kind: head.kind.get(), body, is_critical }))
    }

    /// Skips a section of a kind that this library does not know.
    pub(super) fn skip(&self) -> Result<(), DescriptorError> {
        if self.is_critical { Err(DescriptorError::UnknownSection { kind: self.kind }) } else { Ok(()) }
    }
}

/// Writes the head of a critical section with a body of `bytes` bytes.
pub(super) fn begin(kind: u16, bytes: usize, written: &mut Vec<u8>) {
    write_head(kind, CRITICAL, bytes, written);
}

/// Writes the head of a section that readers may skip, with a body of `bytes` bytes.
pub(super) fn begin_optional(kind: u16, bytes: usize, written: &mut Vec<u8>) {
    write_head(kind, 0, bytes, written);
}

fn write_head(kind: u16, flags: u16, bytes: usize, written: &mut Vec<u8>) {
    let (kind, flags) = (U16::new(kind), U16::new(flags));
    written.extend_from_slice(SectionHead { kind, flags, bytes: U32::new(bytes as u32) }.as_bytes());
}

/// Removes the next bytes from a section's body.
pub(super) fn take<'a>(body: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], DescriptorError> {
    let (taken, rest) = body.split_at_checked(bytes).ok_or_else(cut_off)?;
    *body = rest;
    Ok(taken)
}

/// Removes the fixed part from a section's body.
pub(super) fn take_head<'a, H>(body: &mut &'a [u8]) -> Result<&'a H, DescriptorError>
where
    H: FromBytes + Immutable + KnownLayout + Unaligned,
{
    let (head, rest) = H::ref_from_prefix(body).map_err(|_| cut_off())?;
    *body = rest;
    Ok(head)
}

/// Checks that no bytes of a section's body are left.
pub(super) fn check_end(body: &[u8]) -> Result<(), DescriptorError> {
    if body.is_empty() { Ok(()) } else { Err(bad("length", "a section is longer than its fields")) }
}

pub(super) fn bad(field: &'static str, why: &str) -> DescriptorError {
    DescriptorError::BadField { field, why: why.to_owned() }
}

fn cut_off() -> DescriptorError {
    bad("length", "a section needs more bytes than there are")
}
