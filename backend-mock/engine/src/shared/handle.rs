//! Handles: 64 bytes that name memory or an event to another process.
//!
//! 64 bytes is the size of the vendors' handles. The checksum detects bytes that are not a handle before they are
//! taken for a process and a descriptor number.

use super::page::ExportEpoch;
use crate::model::EngineError;
use crate::system::ProcessId;

/// Size of a handle in bytes.
pub const HANDLE_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"MOCKipc\x01";

/// The kind of object that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleKind {
    /// Memory that opens by the bytes alone.
    Bytes = 1,
    /// Memory that opens by the bytes and a file descriptor.
    Descriptor = 2,
    /// An event.
    Event = 3,
}

/// A decoded handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) kind: HandleKind,
    /// The exporting process.
    pub(crate) exporter: ProcessId,
    /// Number of the memory file's descriptor in the exporter.
    pub(crate) fd: u32,
    /// Generation of the allocation, or number of the event.
    pub(crate) id: u64,
    /// The epoch in which the export was made.
    pub(crate) epoch: ExportEpoch,
    /// Size in bytes; 0 for an event.
    pub(crate) size: u64,
}

impl Handle {
    /// Encodes the handle.
    pub(crate) fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&self.fd.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.exporter.pid.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.exporter.start.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.id.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.size.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.epoch.whole.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.epoch.separate.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.epoch.part.to_le_bytes());
        let sum = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a handle.
    ///
    /// # Errors
    /// `InvalidHandle` for bytes that [`encode`](Self::encode) did not make.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, EngineError> {
        let invalid = |reason| EngineError::InvalidHandle { reason };
        let bytes: &[u8; HANDLE_BYTES] =
            bytes.try_into().map_err(|_| invalid("a handle has exactly 64 bytes"))?;
        if bytes[..8] != MAGIC {
            return Err(invalid("the bytes are not a handle of this engine"));
        }
        if u64_at(bytes, 56) != checksum(&bytes[..56]) {
            return Err(invalid("the checksum does not match: the bytes are corrupt"));
        }
        let kind = match u32_at(bytes, 8) {
            1 => HandleKind::Bytes,
            2 => HandleKind::Descriptor,
            3 => HandleKind::Event,
            _ => return Err(invalid("the kind is unknown")),
        };
        Ok(Self {
            kind,
            exporter: ProcessId { pid: u32_at(bytes, 16), start: u64_at(bytes, 24) },
            fd: u32_at(bytes, 12),
            id: u64_at(bytes, 32),
            epoch: ExportEpoch {
                whole: u32_at(bytes, 48),
                separate: u32_at(bytes, 20),
                part: u32_at(bytes, 52),
            },
            size: u64_at(bytes, 40),
        })
    }
}

fn u32_at(bytes: &[u8; HANDLE_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn u64_at(bytes: &[u8; HANDLE_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

/// Returns the 64-bit FNV-1a hash, which detects accidents, not forgery.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_bits_and_other_lengths_are_rejected() {
        let handle = Handle {
            kind: HandleKind::Bytes,
            exporter: ProcessId { pid: 77, start: 1234 },
            fd: 300,
            id: 5,
            epoch: ExportEpoch { whole: 2, separate: 3, part: 4 },
            size: 4096,
        };
        let bytes = handle.encode();
        assert_eq!(Handle::decode(&bytes), Ok(handle));
        for bit in 0..HANDLE_BYTES * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(Handle::decode(&changed), Err(EngineError::InvalidHandle { .. })), "bit {bit}");
        }
        for len in 0..HANDLE_BYTES {
            assert!(Handle::decode(&bytes[..len]).is_err());
        }
        assert!(Handle::decode(&[0; HANDLE_BYTES]).is_err());
        assert!(Handle::decode(&[0; 65]).is_err());
    }
}
