//! A descriptor's bytes, altered on purpose and given a checksum that fits: what a damaged or a lying sender could send.
//!
//! The places are those of `docs/spec/descriptor.md`, written down here a second time, so that a change of the layout that
//! forgets the specification is noticed.

use std::ops::Range;

use device_ipc_core::{Descriptor, DescriptorError};

/// Bytes of the fixed part.
pub const HEAD_BYTES: usize = 141;
/// Bytes of the checksum at the end.
pub const CHECKSUM_BYTES: usize = 4;
/// The major version.
pub const MAJOR: Range<usize> = 4..5;
/// The minor version.
pub const MINOR: Range<usize> = 5..6;
/// The flags; the lower eight must be known to the reader.
pub const FLAGS: Range<usize> = 6..8;
/// The device where the bytes live: its UUID, or the id of its host.
pub const HOME: Range<usize> = 13..29;
/// The exporter's host.
pub const HOST: Range<usize> = 33..49;
/// The boot id of the exporter's host.
pub const BOOT: Range<usize> = 49..65;
/// The exporter's network namespace.
pub const NET_NAMESPACE: Range<usize> = 73..81;
/// When the exporter started.
pub const START_TIME: Range<usize> = 85..93;
/// The number of the export.
pub const EXPORT: Range<usize> = 93..101;
/// The secret.
pub const TOKEN: Range<usize> = 101..117;
/// Where the region begins in its first allocation.
pub const OFFSET: Range<usize> = 117..125;
/// Its length.
pub const LEN: Range<usize> = 125..133;
/// The length of the backend's name.
pub const BACKEND_BYTES: usize = 135;
/// The length of the socket's address.
pub const ADDRESS_BYTES: usize = 137;

/// The place of the backend's name.
pub fn backend_name(bytes: &[u8]) -> Range<usize> {
    HEAD_BYTES..HEAD_BYTES + usize::from(bytes[BACKEND_BYTES])
}

/// The place of the first allocation's size.
pub fn extent_size(bytes: &[u8]) -> Range<usize> {
    let start = backend_name(bytes).end + usize::from(bytes[ADDRESS_BYTES]);
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
