//! The bytes of handles as they travel. All of it is hostile when it arrives.
//!
//! A key is 65 bytes that end with a NUL, or with NULs: text with the driver of 910, A2 and A3, any bytes but NUL with
//! that of 950; so it is never taken for text. Behind it stands the size of the allocation, since ACL before CANN 9.0 does not
//! tell an importer what it has mapped. A bare key of 65 bytes is what torch_npu and others send.

use std::ffi::c_char;
use std::fmt;

use device_ipc_core::{Error, Result};

/// The length of a key with its final NUL: what `aclrtIpcMemGetExportKey` asks for, neither more nor less.
pub(crate) const KEY_BYTES: usize = 65;
/// A shareable handle and the size of the physical memory, each as eight bytes, the lowest first.
pub(crate) const SHAREABLE_BYTES: usize = 16;

/// An IPC key. Not shown by `Debug`: who reads it may open the memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl Key {
    /// The vendor's bytes, if there is a key in them: at least one byte before a NUL.
    pub(crate) fn new(bytes: [u8; KEY_BYTES]) -> Option<Self> {
        let len = bytes.iter().position(|byte| *byte == 0).filter(|len| *len > 0)?;
        // What is behind the NUL says nothing: one key is one value here.
        let mut key = [0; KEY_BYTES];
        key[..len].copy_from_slice(&bytes[..len]);
        Some(Self(key))
    }

    /// For a call; it ends with a NUL.
    pub(crate) fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }

    /// As it travels, with the size of the allocation.
    pub(crate) fn with_size(&self, size: u64) -> Vec<u8> {
        [self.0.as_slice(), &size.to_le_bytes()].concat()
    }

    /// The key in the bytes of a handle, and the size that they state; a bare key states none, and `otherwise` is taken.
    pub(crate) fn parse(bytes: &[u8], otherwise: u64) -> Result<(Self, u64)> {
        let size = match bytes.len() {
            KEY_BYTES => Some(otherwise),
            _ => bytes.get(KEY_BYTES..).and_then(|size| Some(u64::from_le_bytes(size.try_into().ok()?))),
        };
        let (Some(size), Some(key)) = (size, bytes.first_chunk::<KEY_BYTES>()) else {
            return Err(Error::Protocol(format!(
                "an Ascend key has {KEY_BYTES} bytes, with its size {}, and {} came",
                KEY_BYTES + 8,
                bytes.len()
            )));
        };
        match Self::new(*key) {
            Some(key) => Ok((key, size)),
            None => Err(Error::Protocol("an Ascend key has no final NUL, or nothing before it".into())),
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// A shareable handle with its size as it travels.
pub(crate) fn shareable_bytes(handle: u64, size: u64) -> Vec<u8> {
    [handle.to_le_bytes(), size.to_le_bytes()].concat()
}

/// The shareable handle that arrived, and the size that it states.
pub(crate) fn parse_shareable(bytes: &[u8]) -> Result<(u64, u64)> {
    let parsed: Option<[u8; SHAREABLE_BYTES]> = bytes.try_into().ok();
    let Some((number, size)) = parsed.as_ref().and_then(|bytes| bytes.split_first_chunk::<8>()) else {
        return Err(Error::Protocol(format!(
            "an Ascend shareable handle with its size has {SHAREABLE_BYTES} bytes, and {} came",
            bytes.len()
        )));
    };
    let size = size.try_into().map_or(0, u64::from_le_bytes);
    match u64::from_le_bytes(*number) {
        0 => Err(Error::Protocol("an Ascend shareable handle is 0".into())),
        _ if size == 0 => Err(Error::Protocol("an Ascend shareable handle states no bytes".into())),
        number => Ok((number, size)),
    }
}

/// A process as the driver knows it, as it travels.
pub(crate) fn pid_bytes(pid: i32) -> Vec<u8> {
    pid.to_le_bytes().to_vec()
}

/// The processes in a peer's id: one after the other, four bytes each.
pub(crate) fn parse_pids(peer: &[u8]) -> Result<Vec<i32>> {
    let (chunks, rest) = peer.as_chunks::<4>();
    let pids: Vec<i32> = chunks.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    if !rest.is_empty() || pids.is_empty() || pids.iter().any(|pid| *pid <= 0) {
        return Err(Error::Protocol(format!(
            "the importer's id among Ascend's processes makes no sense ({} bytes)",
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
    fn a_key_of_any_bytes_but_nul_travels() {
        for (byte, len) in [(b'a', 64), (0xff, 50), (0x80, 1)] {
            let sent = Key::new(key(byte, len)).unwrap();
            let bytes = sent.with_size(1 << 40);
            assert_eq!(bytes.len(), 73);
            assert_eq!(Key::parse(&bytes, 4096).unwrap(), (sent, 1 << 40));
            assert_eq!(Key::parse(&key(byte, len), 4096).unwrap(), (sent, 4096));
        }
    }

    #[test]
    fn what_is_behind_the_nul_makes_no_other_key() {
        let mut bytes = key(b'a', 50);
        bytes[60] = 7;
        assert_eq!(Key::new(bytes), Key::new(key(b'a', 50)));
    }

    #[test]
    fn a_key_without_an_end_or_without_a_byte_is_refused() {
        for bytes in [key(0xff, 65), key(0, 65)] {
            let error = Key::parse(&bytes, 1).unwrap_err().to_string();
            assert!(error.contains("final NUL"), "{error}");
        }
        for len in [0, 1, 64, 66, 72, 74, 4096] {
            let error = Key::parse(&vec![b'a'; len], 1).unwrap_err().to_string();
            assert!(error.contains(&format!("{len} came")), "{error}");
        }
    }

    #[test]
    fn a_shareable_handle_travels_with_its_size() {
        assert_eq!(parse_shareable(&shareable_bytes(77, 2 << 20)).unwrap(), (77, 2 << 20));
        for bytes in [vec![0; 16], vec![7; 15], vec![7; 17], Vec::new(), shareable_bytes(7, 0)] {
            assert!(parse_shareable(&bytes).is_err());
        }
    }

    #[test]
    fn ids_of_processes_are_whole_and_above_zero() {
        assert_eq!(parse_pids(&pid_bytes(31_337)).unwrap(), [31_337]);
        assert_eq!(parse_pids(&[pid_bytes(1), pid_bytes(2)].concat()).unwrap(), [1, 2]);
        for bad in [vec![], vec![1], vec![1, 0, 0, 0, 9], pid_bytes(0), pid_bytes(-1)] {
            assert!(parse_pids(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", Key::new(key(b'a', 64)).unwrap()), "Key(..)");
    }
}
