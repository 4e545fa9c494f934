//! A descriptor's bytes, altered on purpose and given a checksum that fits: what a damaged or a lying sender could send.
//!
//! The places are those of `docs/spec/descriptor.md`, written down here a second time, so that a change of the layout that
//! forgets the specification is noticed.

use std::ops::Range;

use device_ipc_core::{Descriptor, DescriptorError};

/// Where the backend's name begins: behind the fixed part of the exporter's section.
pub const HEAD_BYTES: usize = 84;
/// Bytes of the checksum at the end.
pub const CHECKSUM_BYTES: usize = 4;
/// The major version.
pub const MAJOR: Range<usize> = 4..5;
/// The minor version.
pub const MINOR: Range<usize> = 5..6;
/// The flags; the lower eight must be known to the reader.
pub const FLAGS: Range<usize> = 6..8;
/// The exporter's host.
pub const HOST: Range<usize> = 20..36;
/// The boot id of the exporter's host.
pub const BOOT: Range<usize> = 36..52;
/// The exporter's network namespace.
pub const NET_NAMESPACE: Range<usize> = 60..68;
/// When the exporter started.
pub const START_TIME: Range<usize> = 72..80;
/// The access that the exporter permits.
pub const ACCESS: usize = 80;
/// The length of the backend's name.
pub const BACKEND_BYTES: usize = 81;
/// The length of the socket's address.
pub const ADDRESS_BYTES: usize = 83;

/// The place of the backend's name.
pub fn backend_name(bytes: &[u8]) -> Range<usize> {
    HEAD_BYTES..HEAD_BYTES + usize::from(bytes[BACKEND_BYTES])
}

/// Where the body of the first section of regions begins.
pub fn regions(bytes: &[u8]) -> usize {
    backend_name(bytes).end + usize::from(bytes[ADDRESS_BYTES]) + 8
}

/// The places of one region's fields, which depend on the lengths before them.
pub struct Places {
    /// The number of the export.
    pub export: Range<usize>,
    /// The secret.
    pub token: Range<usize>,
    /// The device where the bytes live: its UUID, or the id of its host.
    pub home: Range<usize>,
    /// Where the region begins in its first allocation.
    pub offset: Range<usize>,
    /// Its length.
    pub len: Range<usize>,
}

/// The places in the descriptor of one region.
pub fn places(descriptor: &Descriptor) -> Places {
    let bytes = descriptor.to_bytes();
    let at = regions(&bytes);
    let section = u32::from_le_bytes([bytes[at - 4], bytes[at - 3], bytes[at - 2], bytes[at - 1]]) as usize;
    let region = at + section + 8;
    Places {
        export: at..at + 8,
        token: at + 8..at + 24,
        home: at + 25..at + 41,
        offset: region..region + 8,
        len: region + 8..region + 16,
    }
}

/// The place of the first allocation's size.
pub fn extent_size(bytes: &[u8]) -> Range<usize> {
    let start = regions(bytes) + 50 + 4;
    start..start + 8
}

/// The place of the first allocation's number.
pub fn extent_generation(bytes: &[u8]) -> Range<usize> {
    let start = extent_size(bytes).end;
    start..start + 8
}

/// The descriptor with its bytes altered, and a checksum that fits.
pub fn altered(
    descriptor: &Descriptor,
    alter: impl FnOnce(&mut [u8]),
) -> Result<Descriptor, DescriptorError> {
    let mut bytes = descriptor.to_bytes();
    let covered = bytes.len() - CHECKSUM_BYTES;
    alter(&mut bytes[..covered]);
    let checksum = crc32fast::hash(&bytes[..covered]).to_le_bytes();
    bytes[covered..].copy_from_slice(&checksum);
    Descriptor::from_bytes(&bytes)
}

/// Flips the lowest bit of the first byte of `place`.
pub fn flip(bytes: &mut [u8], place: Range<usize>) {
    bytes[place.start] ^= 1;
}
