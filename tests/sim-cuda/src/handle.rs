//! Handles: 64 bytes that name memory or an event of another process.
//!
//! An open of memory reads only 19 of the bytes, as measured on two H200 with driver 580.159.04, so that a handle
//! with other damaged bytes still opens. The other bytes have the fields of events.

use rustix::fs::stat;

/// The first byte of a handle is ignored, as by the driver.
const MAGIC: u64 = u64::from_le_bytes(*b"\0simcuda");
const IGNORED: u64 = 0xff;
/// Widths of the fields of a place in bits. Linux pids have at most 22.
const FD_BITS: u32 = 20;
const SLOT_BITS: u32 = 16;
const GENERATION_BITS: u32 = 16;
const PID_BITS: u32 = 24;
/// Neither all zeros nor all ones.
const MARK: u64 = 0b0110;
/// The word with the place in the exporter, and its byte with the checksum of the others.
const WHERE: usize = 6;
const CHECK: u32 = 56;

/// The kind of object that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleKind {
    Memory = 1,
    Event = 2,
}

/// A slot of an exporter's directory: all that an open of memory reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The pid of the exporter, in its pid namespace.
    pub(crate) pid: u32,
    /// The descriptor of the exporter's directory.
    pub(crate) fd: u32,
    /// Distinguishes the exporter from other processes with its pid.
    pub(crate) nonce: u64,
    pub(crate) slot: u32,
    /// The low bits of the number of the export.
    generation: u16,
}

impl Place {
    /// Creates a place; `None` for numbers that exceed their fields.
    pub(crate) fn new(pid: u32, fd: u32, nonce: u64, slot: u32, id: u64) -> Option<Self> {
        let fits = pid >> PID_BITS == 0 && fd >> FD_BITS == 0 && slot >> SLOT_BITS == 0;
        fits.then_some(Self { pid, fd, nonce, slot, generation: id as u16 })
    }

    /// Decodes a place; `None` for bytes that no exporter made.
    pub(crate) fn decode(bytes: &[u8; 64]) -> Option<Self> {
        let pid = u64_at(bytes, 3) >> 32 & low(PID_BITS);
        let (nonce, place) = (u64_at(bytes, 2), u64_at(bytes, WHERE));
        let part = |from: u32, bits: u32| place >> from & low(bits);
        let mark = part(FD_BITS + SLOT_BITS + GENERATION_BITS, 4);
        if mark != MARK || place >> CHECK != u64::from(check(nonce, pid, place & low(CHECK))) {
            return None;
        }
        Some(Self {
            pid: pid as u32,
            fd: part(0, FD_BITS) as u32,
            nonce,
            slot: part(FD_BITS, SLOT_BITS) as u32,
            generation: part(FD_BITS + SLOT_BITS, GENERATION_BITS) as u16,
        })
    }

    fn word(&self) -> u64 {
        let word = u64::from(self.fd)
            | u64::from(self.slot) << FD_BITS
            | u64::from(self.generation) << (FD_BITS + SLOT_BITS)
            | MARK << (FD_BITS + SLOT_BITS + GENERATION_BITS);
        word | u64::from(check(self.nonce, u64::from(self.pid), word)) << CHECK
    }
}

/// A decoded handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) place: Place,
    pub(crate) kind: HandleKind,
    /// Number of the export.
    pub(crate) id: u64,
    pub(crate) pid_namespace: u64,
    /// Identity of the exporter's `/dev/shm`.
    pub(crate) shared_memory: u64,
}

impl Handle {
    pub(crate) fn encode(&self) -> [u8; 64] {
        let words = [
            MAGIC,
            self.pid_namespace,
            self.place.nonce,
            self.kind as u64 | u64::from(self.place.pid) << 32,
            self.id,
            self.shared_memory,
            self.place.word(),
        ];
        let mut bytes = [0; 64];
        for (at, word) in words.into_iter().chain([checksum(&words)]).enumerate() {
            bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a handle, reading all bytes; `None` for bytes that no exporter made, and for a handle of another
    /// kind.
    pub(crate) fn decode(bytes: &[u8; 64], kind: HandleKind) -> Option<Self> {
        let mut words: [u64; 7] = std::array::from_fn(|at| u64_at(bytes, at));
        words[0] &= !IGNORED;
        let known = words[0] == MAGIC && u64_at(bytes, 7) == checksum(&words);
        if !known || words[3] & low(32) != kind as u64 {
            return None;
        }
        let place = Place::decode(bytes)?;
        Some(Self { place, kind, id: words[4], pid_namespace: words[1], shared_memory: words[5] })
    }

    /// Returns whether the exporter is in another pid namespace.
    pub(crate) fn is_in_other_pid_namespace(&self) -> bool {
        self.pid_namespace != pid_namespace()
    }
}

/// Returns the identity of this process's pid namespace.
pub(crate) fn pid_namespace() -> u64 {
    stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}

/// Returns the identity of this process's `/dev/shm`; 0 if it has none.
pub(crate) fn shared_memory() -> u64 {
    stat("/dev/shm").map_or(0, |stat| stat.st_dev ^ stat.st_ino.rotate_left(32))
}

pub(crate) fn u64_at(bytes: &[u8], word: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| bytes[word * 8 + at]))
}

fn low(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// Returns a checksum that changes with every single bit and every inverted byte.
fn check(nonce: u64, pid: u64, place: u64) -> u8 {
    let bytes = [nonce, pid, place].map(u64::to_le_bytes);
    bytes.as_flattened().iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Returns the FNV-1a hash of the words, which detects accidents, not forgery.
fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |sum, word| {
        word.to_le_bytes()
            .iter()
            .fold(sum, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(kind: HandleKind) -> Handle {
        Handle {
            place: Place::new(4_194_303, 1_048_575, 0x1234_5678_9abc_def0, 65_535, 70_000).expect("fits"),
            kind,
            id: 70_000,
            pid_namespace: 4_026_531_836,
            shared_memory: 22,
        }
    }

    #[test]
    fn event_handle_round_trips_and_changed_bits_are_rejected() {
        let handle = handle(HandleKind::Event);
        let bytes = handle.encode();
        assert_eq!(Handle::decode(&bytes, HandleKind::Event), Some(handle));
        assert_eq!(Handle::decode(&bytes, HandleKind::Memory), None);
        for bit in 0..512 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            let expected = (bit < 8).then_some(handle);
            assert_eq!(Handle::decode(&changed, HandleKind::Event), expected, "bit {bit}");
        }
        assert_eq!(Handle::decode(&[0; 64], HandleKind::Event), None);
    }

    #[test]
    fn memory_handle_is_checked_by_19_bytes() {
        let handle = handle(HandleKind::Memory);
        let bytes = handle.encode();
        assert_eq!(Place::decode(&bytes), Some(handle.place));
        let is_looked_at = |at: &usize| matches!(at, 16..24 | 28..31 | 48..56);
        assert_eq!((0..64).filter(is_looked_at).count(), 19);
        for at in 0..64 {
            let expected = (!is_looked_at(&at)).then_some(handle.place);
            for bits in (0..8).map(|bit| 1 << bit).chain([0xff]) {
                let mut changed = bytes;
                changed[at] ^= bits;
                assert_eq!(Place::decode(&changed), expected, "byte {at}, bits {bits:#x}");
            }
        }
        assert_eq!(Place::decode(&[0; 64]), None);
        assert_eq!(Place::decode(&bytes.map(|byte| !byte)), None);
    }

    #[test]
    fn place_beyond_field_widths_is_rejected() {
        assert_eq!(Place::new(1 << 24, 3, 5, 7, 9), None);
        assert_eq!(Place::new(1, 1 << 20, 5, 7, 9), None);
        assert_eq!(Place::new(1, 3, 5, 1 << 16, 9), None);
    }
}
