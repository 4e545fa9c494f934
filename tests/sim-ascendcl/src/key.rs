//! Keys: the names of exports.
//!
//! The second generation of the driver's memory code creates keys of 64 digits (`%08x` pid, `%016llx` reference,
//! `%02x` device, `%02x` virtual function, `%08x` super device, zeros; hicann/driver, `svm_shmem_interprocess.c`
//! and `svm_shmem_node.c`), the third binary bytes without a NUL (`svm_ipc.c`). The second form detects programs
//! that take keys for text.

/// Size of the buffer for a key in bytes, with its NUL.
pub const KEY_BYTES: usize = 65;

/// Length of a binary key in bytes.
const BINARY_BYTES: usize = 50;

/// A decoded key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) pid: u32,
    pub(crate) reference: u64,
    /// Physical id.
    pub(crate) device: u8,
}

impl Key {
    /// Encodes the bytes before the NUL.
    pub(crate) fn encode(self, binary: bool) -> Vec<u8> {
        if !binary {
            let text =
                format!("{:08x}{:016x}{:02x}00{:08x}", self.pid, self.reference, self.device, u32::MAX);
            return format!("{text:0<64}").into_bytes();
        }
        let mut raw = Vec::with_capacity(13);
        raw.extend(self.pid.to_le_bytes());
        raw.extend(self.reference.to_le_bytes());
        raw.push(self.device);
        // Seven bits per byte, with the highest bit set: never NUL, never UTF-8.
        let bits = raw.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1)).collect::<Vec<u8>>();
        let pack = |bits: &[u8]| bits.iter().rev().fold(1, |byte, bit| byte << 1 | bit) | 0x80;
        let mut key: Vec<u8> = bits.chunks(7).map(pack).collect();
        key.resize(BINARY_BYTES, 0xff);
        key
    }

    /// Decodes the bytes before the NUL; `None` for bytes that no driver made.
    pub(crate) fn decode(key: &[u8]) -> Option<Self> {
        match key.len() {
            64 => Self::decode_text(std::str::from_utf8(key).ok()?),
            BINARY_BYTES => Self::decode_binary(key),
            _ => None,
        }
    }

    fn decode_text(text: &str) -> Option<Self> {
        if !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        let pid = u32::from_str_radix(&text[..8], 16).ok()?;
        let reference = u64::from_str_radix(&text[8..24], 16).ok()?;
        let device = u8::from_str_radix(&text[24..26], 16).ok()?;
        let key = Self { pid, reference, device };
        (key.encode(false) == text.as_bytes()).then_some(key)
    }

    fn decode_binary(key: &[u8]) -> Option<Self> {
        let bits: Vec<u8> =
            key[..15].iter().flat_map(|byte| (0..7).map(move |bit| byte >> bit & 1)).collect();
        let pack = |bits: &[u8]| bits.iter().rev().fold(0_u8, |byte, bit| byte << 1 | bit);
        let raw: Vec<u8> = bits[..104].chunks(8).map(pack).collect();
        let pid = u32::from_le_bytes(raw[..4].try_into().ok()?);
        let reference = u64::from_le_bytes(raw[4..12].try_into().ok()?);
        let decoded = Self { pid, reference, device: raw[12] };
        (decoded.encode(true) == key).then_some(decoded)
    }
}

/// Packs pid, descriptor and some bits of the count into the 64 bits of a shareable handle.
pub(crate) fn to_number(pid: u32, reference: u64) -> u64 {
    u64::from(pid) << 42 | reference & ((1 << 42) - 1)
}

/// Unpacks pid and reference; exact for the first four million exports of a process.
pub(crate) fn from_number(number: u64) -> (u32, u64) {
    ((number >> 42) as u32, number & ((1 << 42) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key { pid: 0x003f_0001, reference: 0x1234_5678_9abc_def0, device: 7 };

    #[test]
    fn both_key_forms_round_trip_without_nul() {
        for key in [KEY, Key { pid: 1, reference: 0, device: 0 }] {
            for binary in [false, true] {
                let bytes = key.encode(binary);
                assert!(bytes.len() < KEY_BYTES && !bytes.contains(&0));
                assert_eq!(Key::decode(&bytes), Some(key));
                assert_eq!(std::str::from_utf8(&bytes).is_ok(), !binary);
            }
        }
        assert_eq!(KEY.encode(false), b"003f0001123456789abcdef00700ffffffff0000000000000000000000000000");
    }

    #[test]
    fn other_bytes_are_rejected() {
        for binary in [false, true] {
            let bytes = KEY.encode(binary);
            assert_eq!(Key::decode(&bytes[..bytes.len() - 1]), None);
            let mut other = bytes.clone();
            *other.last_mut().expect("bytes") = b'x';
            assert_eq!(Key::decode(&other), None);
        }
        assert_eq!(Key::decode(b""), None);
        assert_eq!(Key::decode(&[0xc3; 64]), None);
    }

    #[test]
    fn number_packs_pid_and_reference() {
        let reference = 77 << 20 | 4099;
        assert_eq!(from_number(to_number(4_000_000, reference)), (4_000_000, reference));
    }
}
