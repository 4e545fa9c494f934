//! What every binary form has around its own fields: magic bytes, a version, flags and its length before them, and a checksum
//! behind.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DescriptorError, FormatVersion};
use crate::tensor::checked_total;

/// The bytes behind the last field: CRC-32 of all before them.
pub(crate) const CHECKSUM_BYTES: usize = 4;

/// Bits that a reader must know; those above it may pass over.
const MANDATORY_FLAGS: u16 = 0x00ff;

/// The first fields of each form's fixed part.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Preamble {
    magic: [u8; 4],
    major: u8,
    minor: u8,
    pub(crate) flags: U16,
    total_bytes: U32,
}

/// A binary form, by what tells it from the others.
pub(crate) struct Form {
    pub(crate) magic: [u8; 4],
    /// The version that this library writes.
    pub(crate) version: FormatVersion,
    /// As in [`DescriptorError::Version`].
    pub(crate) what: &'static str,
    pub(crate) most_bytes: usize,
    /// The flags that this library knows.
    pub(crate) known_flags: u16,
    /// What is wrong with bytes that begin otherwise.
    pub(crate) otherwise: DescriptorError,
}

impl Form {
    /// The first fields, for a form of so many bytes altogether.
    pub(crate) fn preamble(&self, flags: u16, total: usize) -> Preamble {
        Preamble {
            magic: self.magic,
            major: self.version.major,
            minor: self.version.minor,
            flags: U16::new(flags),
            total_bytes: U32::new(total as u32),
        }
    }

    /// The fixed part, which begins with a [`Preamble`], and the rest, once size, version, checksum and flags have been
    /// checked.
    pub(crate) fn checked_parts<'a, H>(&self, bytes: &'a [u8]) -> Result<(&'a H, &'a [u8]), DescriptorError>
    where
        H: FromBytes + Immutable + KnownLayout + Unaligned,
    {
        let found = bytes.len();
        if found > self.most_bytes {
            return Err(DescriptorError::TooLarge { found });
        }
        if !bytes.starts_with(&self.magic[..found.min(self.magic.len())]) {
            return Err(self.otherwise.clone());
        }
        let least = size_of::<H>() + CHECKSUM_BYTES;
        let truncated = || DescriptorError::Truncated { found, expected: least };
        // The version stands at the same place in every layout, so it can be told before the rest makes sense.
        let (Some(&major), Some(&minor)) = (bytes.get(4), bytes.get(5)) else { return Err(truncated()) };
        if major != self.version.major {
            let found = FormatVersion { major, minor };
            return Err(DescriptorError::Version { what: self.what, found, readable: self.version });
        }
        let (preamble, _) = Preamble::ref_from_prefix(bytes).map_err(|_| truncated())?;
        let (head, _) = H::ref_from_prefix(bytes).map_err(|_| truncated())?;
        let covered = checked_total(bytes, preamble.total_bytes.get(), least)?;
        let unknown = preamble.flags.get() & MANDATORY_FLAGS & !self.known_flags;
        if unknown != 0 {
            return Err(DescriptorError::UnknownFeatures { flags: unknown });
        }
        Ok((head, &covered[size_of::<H>()..]))
    }
}

/// Appends the checksum of all that has been written.
pub(crate) fn close(bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&crc32fast::hash(bytes).to_le_bytes());
}
