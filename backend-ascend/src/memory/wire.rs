//! The encoding of handles. Received bytes are untrusted.
//!
//! A key is 65 bytes that end with one or more NULs: text with the driver of 910, A2 and A3, any bytes but NUL with
//! that of 950; so it is never treated as text. The size of the allocation follows, since ACL before CANN 9.0 has no
//! query for an importer's mapped range. torch_npu and others send a bare key of 65 bytes.

use std::ffi::c_char;
use std::fmt;

use device_ipc_core::{Error, Result};

/// The length of a key with its final NUL: exactly the length that `aclrtIpcMemGetExportKey` requires.
pub(crate) const KEY_BYTES: usize = 65;
/// The length of a shareable handle with the size of the physical memory, each as eight little-endian bytes.
const SHAREABLE_BYTES: usize = 16;

/// An IPC key. `Debug` does not show it: a process that reads it may be able to open the memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl Key {
    /// Returns the key in the vendor's bytes: at least one byte before a NUL.
    pub(crate) fn new(bytes: [u8; KEY_BYTES]) -> Option<Self> {
        let len = bytes.iter().position(|byte| *byte == 0).filter(|len| *len > 0)?;
        // Bytes after the NUL are ignored, so that equal keys compare equal.
        let mut key = [0; KEY_BYTES];
        key[..len].copy_from_slice(&bytes[..len]);
        Some(Self(key))
    }

    /// Returns the key for a call; it ends with a NUL.
    pub(crate) fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }

    /// Encodes the key with the size of the allocation.
    pub(crate) fn with_size(&self, size: u64) -> Vec<u8> {
        [self.0.as_slice(), &size.to_le_bytes()].concat()
    }

    /// Parses the key in the bytes of a handle, and the stated size; a bare key states none, and has `default_size`.
    pub(crate) fn parse(bytes: &[u8], default_size: u64) -> Result<(Self, u64)> {
        let size = match bytes.len() {
            KEY_BYTES => Some(default_size),
            _ => bytes.get(KEY_BYTES..).and_then(|size| Some(u64::from_le_bytes(size.try_into().ok()?))),
        };
        let (Some(size), Some(key)) = (size, bytes.first_chunk::<KEY_BYTES>()) else {
            return Err(Error::Protocol(format!(
                "received an Ascend key of {} bytes, expected {KEY_BYTES}, or {} with a size",
                bytes.len(),
                KEY_BYTES + 8
            )));
        };
        match Self::new(*key) {
            Some(key) => Ok((key, size)),
            None => {
                Err(Error::Protocol("received an Ascend key without a final NUL, or an empty one".into()))
            }
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Encodes a shareable handle with its size.
pub(crate) fn shareable_bytes(handle: u64, size: u64) -> Vec<u8> {
    [handle.to_le_bytes(), size.to_le_bytes()].concat()
}

/// Parses a shareable handle, and the stated size.
pub(crate) fn parse_shareable(bytes: &[u8]) -> Result<(u64, u64)> {
    let parsed: Option<[u8; SHAREABLE_BYTES]> = bytes.try_into().ok();
    let Some((number, size)) = parsed.as_ref().and_then(|bytes| bytes.split_first_chunk::<8>()) else {
        return Err(Error::Protocol(format!(
            "received an Ascend shareable handle of {} bytes, expected {SHAREABLE_BYTES}",
            bytes.len()
        )));
    };
    let size = size.try_into().map_or(0, u64::from_le_bytes);
    match u64::from_le_bytes(*number) {
        0 => Err(Error::Protocol("received the invalid Ascend shareable handle 0".into())),
        _ if size == 0 => Err(Error::Protocol("received an Ascend shareable handle of 0 bytes".into())),
        number => Ok((number, size)),
    }
}

/// Encodes the driver's id of a process.
pub(crate) fn pid_bytes(pid: i32) -> Vec<u8> {
    pid.to_le_bytes().to_vec()
}

/// Parses the processes in a peer's id, four bytes each.
pub(crate) fn parse_pids(peer: &[u8]) -> Result<Vec<i32>> {
    let (chunks, rest) = peer.as_chunks::<4>();
    let pids: Vec<i32> = chunks.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    if !rest.is_empty() || pids.is_empty() || pids.iter().any(|pid| *pid <= 0) {
        return Err(Error::Protocol(format!(
            "received invalid Ascend process ids of the importer ({} bytes)",
            peer.len()
        )));
    }
    Ok(pids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8, len: usize) -> [u8; KEY_BYTES] {
        let mut key = [0; KEY_BYTES];
        key[..len].fill(byte);
        key
    }

    #[test]
    fn key_of_any_bytes_but_nul_round_trips() {
        for (byte, len) in [(b'a', 64), (0xff, 50), (0x80, 1)] {
            let sent = Key::new(key(byte, len)).unwrap();
            let bytes = sent.with_size(1 << 40);
            assert_eq!(bytes.len(), 73);
            assert_eq!(Key::parse(&bytes, 4096).unwrap(), (sent, 1 << 40));
            assert_eq!(Key::parse(&key(byte, len), 4096).unwrap(), (sent, 4096));
        }
    }

    #[test]
    fn bytes_after_the_nul_are_ignored() {
        let mut bytes = key(b'a', 50);
        bytes[60] = 7;
        assert_eq!(Key::new(bytes), Key::new(key(b'a', 50)));
    }

    #[test]
    fn unterminated_or_empty_key_is_rejected() {
        for bytes in [key(0xff, 65), key(0, 65)] {
            let error = Key::parse(&bytes, 1).unwrap_err().to_string();
            assert!(error.contains("final NUL"), "{error}");
        }
        for len in [0, 1, 64, 66, 72, 74, 4096] {
            let error = Key::parse(&vec![b'a'; len], 1).unwrap_err().to_string();
            assert!(error.contains(&format!("of {len} bytes")), "{error}");
        }
    }

    #[test]
    fn shareable_handle_round_trips_with_its_size() {
        assert_eq!(parse_shareable(&shareable_bytes(77, 2 << 20)).unwrap(), (77, 2 << 20));
        for bytes in [vec![0; 16], vec![7; 15], vec![7; 17], Vec::new(), shareable_bytes(7, 0)] {
            assert!(parse_shareable(&bytes).is_err());
        }
    }

    #[test]
    fn partial_or_non_positive_process_id_is_rejected() {
        assert_eq!(parse_pids(&pid_bytes(31_337)).unwrap(), [31_337]);
        assert_eq!(parse_pids(&[pid_bytes(1), pid_bytes(2)].concat()).unwrap(), [1, 2]);
        for bad in [vec![], vec![1], vec![1, 0, 0, 0, 9], pid_bytes(0), pid_bytes(-1)] {
            assert!(parse_pids(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn debug_hides_the_key() {
        assert_eq!(format!("{:?}", Key::new(key(b'a', 64)).unwrap()), "Key(..)");
    }
}
