//! What every binary form has around its own fields: magic bytes, a version, flags and its length before them, and a checksum
//! behind.

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DescriptorError, FormatVersion};

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
            if is_intact_with(bytes, offset_of!(Preamble, major), &[self.version.major]) {
                return Err(DescriptorError::BadChecksum);
            }
            let found = FormatVersion { major, minor };
            return Err(DescriptorError::Version { what: self.what, found, readable: self.version });
        }
        let (preamble, _) = Preamble::ref_from_prefix(bytes).map_err(|_| truncated())?;
        let (head, _) = H::ref_from_prefix(bytes).map_err(|_| truncated())?;
        let covered = self.covered(bytes, preamble.total_bytes.get(), least)?;
        let unknown = preamble.flags.get() & MANDATORY_FLAGS & !self.known_flags;
        if unknown != 0 {
            return Err(DescriptorError::UnknownFeatures { flags: unknown });
        }
        Ok((head, &covered[size_of::<H>()..]))
    }

    /// The bytes that the checksum covers, once it fits. Only then, or where nothing else explains the bytes, is the total size
    /// that they state believed.
    fn covered<'a>(&self, bytes: &'a [u8], total: u32, least: usize) -> Result<&'a [u8], DescriptorError> {
        let (found, total) = (bytes.len(), total as usize);
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
        if total > found && total <= self.most_bytes && !length_is_damaged {
            return Err(DescriptorError::Truncated { found, expected: total });
        }
        Err(DescriptorError::BadChecksum)
    }
}

/// All but the checksum, where it fits.
fn intact(bytes: &[u8]) -> Option<&[u8]> {
    let (covered, checksum) = bytes.split_last_chunk::<CHECKSUM_BYTES>()?;
    (crc32fast::hash(covered).to_le_bytes() == *checksum).then_some(covered)
}

/// Does the checksum fit with other bytes in this place? Then these are what is damaged.
fn is_intact_with(bytes: &[u8], at: usize, others: &[u8]) -> bool {
    let Some((covered, checksum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else { return false };
    let Some((before, rest)) = covered.split_at_checked(at) else { return false };
    let Some(behind) = rest.get(others.len()..) else { return false };
    let mut hasher = crc32fast::Hasher::new();
    [before, others, behind].into_iter().for_each(|part| hasher.update(part));
    hasher.finalize().to_le_bytes() == *checksum
}

/// Appends the checksum of all that has been written.
pub(crate) fn close(bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&crc32fast::hash(bytes).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensor::{Dtype, TensorLayout, TensorTable};
    use crate::wire::bundle::BundleDescriptor;
    use crate::wire::descriptor::Descriptor;
    use crate::wire::ring::RingDescriptor;

    type Read = fn(&[u8]) -> Result<(), DescriptorError>;

    /// An example of each form, and its reader.
    fn forms() -> Vec<(&'static str, Vec<u8>, Read)> {
        let layout = TensorLayout::contiguous(Dtype::F32, [2, 3]).unwrap();
        let table = TensorTable::new([("a", 0, layout.clone()), ("b", 24, layout)]).unwrap();
        let ring = crate::fuzzing::ring_seeds().remove(0).1;
        vec![
            ("descriptor", crate::fuzzing::plain_descriptor().to_bytes(), |bytes| {
                Descriptor::from_bytes(bytes).map(drop)
            }),
            ("ring", ring, |bytes| RingDescriptor::from_bytes(bytes).map(drop)),
            ("bundle", crate::fuzzing::plain_bundle().to_bytes(), |bytes| {
                BundleDescriptor::from_bytes(bytes).map(drop)
            }),
            ("table", table.to_bytes(), |bytes| TensorTable::from_bytes(bytes).map(drop)),
        ]
    }

    #[test]
    fn damaged_bit_is_reported_as_damage() {
        for (form, bytes, read) in forms() {
            assert_eq!(read(&bytes), Ok(()), "{form}");
            // Another magic number is another kind of bytes.
            for bit in 4 * 8..bytes.len() * 8 {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(read(&damaged), Err(DescriptorError::BadChecksum), "{form}, bit {bit}");
            }
        }
    }

    #[test]
    fn damaged_length_is_reported_as_damage() {
        for (form, bytes, read) in forms() {
            for length in [0, 1, 12, bytes.len() - 1, bytes.len() + 1, 1_048_806, u32::MAX as usize] {
                let mut damaged = bytes.clone();
                damaged[8..12].copy_from_slice(&(length as u32).to_le_bytes());
                assert_eq!(read(&damaged), Err(DescriptorError::BadChecksum), "{form}, length {length}");
            }
        }
    }

    #[test]
    fn truncated_bytes_are_reported_with_both_lengths() {
        for (form, bytes, read) in forms() {
            for len in 4..bytes.len() {
                let error = read(&bytes[..len]);
                let Err(DescriptorError::Truncated { found, expected }) = error else {
                    panic!("{form}, {len} bytes: {error:?}");
                };
                assert!(found == len && (len < expected && expected <= bytes.len()), "{form}: {expected}");
            }
            let expected = bytes.len();
            let last = read(&bytes[..expected - 1]);
            assert_eq!(last, Err(DescriptorError::Truncated { found: expected - 1, expected }), "{form}");
        }
    }

    #[test]
    fn bytes_behind_the_end_are_counted() {
        for (form, bytes, read) in forms() {
            for extra in [1, 4, 100] {
                let longer = [bytes.as_slice(), &vec![7; extra]].concat();
                assert_eq!(read(&longer), Err(DescriptorError::TrailingBytes { extra }), "{form}");
            }
        }
    }

    #[test]
    fn length_that_contradicts_an_intact_form_is_refused() {
        for (form, bytes, read) in forms() {
            for length in [0, bytes.len() - 1, bytes.len() + 1] {
                let mut forged = bytes[..bytes.len() - CHECKSUM_BYTES].to_vec();
                forged[8..12].copy_from_slice(&(length as u32).to_le_bytes());
                close(&mut forged);
                let error = read(&forged);
                let refused = matches!(error, Err(DescriptorError::BadField { field: "length", .. }));
                assert!(refused, "{form}, length {length}: {error:?}");
            }
        }
    }

    #[test]
    fn other_version_is_reported_where_its_bytes_are_intact() {
        for (form, bytes, read) in forms() {
            let mut other = bytes[..bytes.len() - CHECKSUM_BYTES].to_vec();
            other[4] += 1;
            close(&mut other);
            assert!(matches!(read(&other), Err(DescriptorError::Version { .. })), "{form}");
        }
    }
}
