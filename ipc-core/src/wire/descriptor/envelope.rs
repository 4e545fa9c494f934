//! The envelope of a descriptor: magic bytes, version, flags and total length before the sections, a checksum after them.

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DescriptorError, FormatVersion};
use crate::model::tensor::MAX_TABLE_BYTES;

/// The size of the last field: the CRC-32 of all preceding bytes.
const CHECKSUM_BYTES: usize = 4;

/// Flags that a reader must know. A reader ignores the flags above them.
const MANDATORY_FLAGS: u16 = 0x00ff;

/// The fields before the sections.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Preamble {
    magic: [u8; 4],
    major: u8,
    minor: u8,
    flags: U16,
    total_bytes: U32,
}

/// The first bytes of every descriptor and every tensor table.
const MAGIC: [u8; 4] = *b"DIPC";

/// The format version that this library writes.
pub const FORMAT_VERSION: FormatVersion = FormatVersion { major: 1, minor: 0 };

/// Maximum size of a descriptor in bytes.
pub const MAX_DESCRIPTOR_BYTES: usize = MAX_TABLE_BYTES;

/// The bytes of a descriptor other than its sections.
pub(crate) const ENVELOPE_BYTES: usize = size_of::<Preamble>() + CHECKSUM_BYTES;

/// Writes the fields before the sections of a descriptor of `total` bytes.
pub(super) fn begin(total: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(total);
    let preamble = Preamble {
        magic: MAGIC,
        major: FORMAT_VERSION.major,
        minor: FORMAT_VERSION.minor,
        flags: U16::new(0),
        total_bytes: U32::new(total as u32),
    };
    bytes.extend_from_slice(preamble.as_bytes());
    bytes
}

/// Returns the sections after checking size, version, checksum and flags.
pub(super) fn checked_sections(bytes: &[u8]) -> Result<&[u8], DescriptorError> {
    let found = bytes.len();
    if found > MAX_DESCRIPTOR_BYTES {
        return Err(DescriptorError::TooLarge { found });
    }
    if !bytes.starts_with(&MAGIC[..found.min(MAGIC.len())]) {
        return Err(DescriptorError::BadMagic);
    }
    let truncated = || DescriptorError::Truncated { found, expected: ENVELOPE_BYTES };
    // The version has the same offset in every format, so it is checked before anything else is interpreted.
    let (Some(&major), Some(&minor)) = (bytes.get(4), bytes.get(5)) else { return Err(truncated()) };
    if major != FORMAT_VERSION.major {
        if is_intact_with(bytes, offset_of!(Preamble, major), &[FORMAT_VERSION.major]) {
            return Err(DescriptorError::BadChecksum);
        }
        let found = FormatVersion { major, minor };
        return Err(DescriptorError::Version { found, readable: FORMAT_VERSION });
    }
    let (preamble, _) = Preamble::ref_from_prefix(bytes).map_err(|_| truncated())?;
    let covered = covered(bytes, preamble.total_bytes.get())?;
    let unknown = preamble.flags.get() & MANDATORY_FLAGS;
    if unknown != 0 {
        return Err(DescriptorError::UnknownFeatures { flags: unknown });
    }
    Ok(&covered[size_of::<Preamble>()..])
}

/// Returns the bytes that the checksum covers, once it is correct. The stated total size is believed only then, or if no other
/// damage explains the bytes.
fn covered(bytes: &[u8], total: u32) -> Result<&[u8], DescriptorError> {
    let (found, total, least) = (bytes.len(), total as usize, ENVELOPE_BYTES);
    if let Some(covered) = intact(bytes) {
        if total == found && found >= least {
            return Ok(covered);
        }
        let why = format!("it states {total} bytes, and has {found}");
        return Err(DescriptorError::BadField { field: "length", why });
    }
    if found < least {
        return Err(DescriptorError::Truncated { found, expected: least });
    }
    if (least..found).contains(&total) && intact(&bytes[..total]).is_some() {
        return Err(DescriptorError::TrailingBytes { extra: found - total });
    }
    let own_length = (found as u32).to_le_bytes();
    let length_is_damaged = is_intact_with(bytes, offset_of!(Preamble, total_bytes), &own_length);
    if total > found && total <= MAX_DESCRIPTOR_BYTES && !length_is_damaged {
        return Err(DescriptorError::Truncated { found, expected: total });
    }
    Err(DescriptorError::BadChecksum)
}

/// Returns all bytes before the checksum, if the checksum is correct.
fn intact(bytes: &[u8]) -> Option<&[u8]> {
    let (covered, checksum) = bytes.split_last_chunk::<CHECKSUM_BYTES>()?;
    (crc32fast::hash(covered).to_le_bytes() == *checksum).then_some(covered)
}

/// Returns whether the checksum is correct with other bytes at this place, so that these bytes are the damaged ones.
fn is_intact_with(bytes: &[u8], at: usize, others: &[u8]) -> bool {
    let Some((covered, checksum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else { return false };
    let Some((before, rest)) = covered.split_at_checked(at) else { return false };
    let Some(behind) = rest.get(others.len()..) else { return false };
    let mut hasher = crc32fast::Hasher::new();
    [before, others, behind].into_iter().for_each(|part| hasher.update(part));
    hasher.finalize().to_le_bytes() == *checksum
}

/// Appends the checksum of all bytes written so far.
pub(super) fn close(bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&crc32fast::hash(bytes).to_le_bytes());
}

#[cfg(test)]
mod tests;
