//! What an exporting process tells the others: a table in a memory file, and the 64 bytes that name a place in it.
//!
//! A handle names a place, and the number of what was there when it was made. What is there *now* is in the table: that is
//! how a stale handle comes to open another block, as measured on two H200 with driver 580.159.04. The file has no name,
//! so that nothing is left behind by a process that is killed; another process reaches it through `/proc`, or asks for it
//! where it does not see the exporter there (see [`crate::portal`]).

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open, stat};
use rustix::io::pread;
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::portal;
use crate::status::{Result, Status};

/// The first byte of a handle is not looked at, as by the driver.
const MAGIC: u64 = u64::from_le_bytes(*b"\0simcuda");
const IGNORED: u64 = 0xff;
const SLOTS: usize = 1 << 16;
/// A slot: sequence and state, number, three words of its contents, and for an event the engine's handle.
const WORDS: usize = 16;
const SLOT_BYTES: usize = WORDS * 8;

/// What a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleKind {
    Memory = 1,
    Event = 2,
}

/// A handle, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) kind: HandleKind,
    /// The exporter's pid, as its own pid namespace numbers it.
    pub(crate) pid: u32,
    fd: u32,
    /// Tells the exporter from others that have, or will have, its pid.
    pub(crate) nonce: u64,
    slot: u32,
    /// Number of what was exported.
    pub(crate) id: u64,
    pid_namespace: u64,
    /// Which `/dev/shm` the exporter has.
    pub(crate) shared_memory: u64,
}

impl Handle {
    pub(crate) fn encode(&self) -> [u8; 64] {
        let words = [
            MAGIC,
            u64::from(self.pid) | u64::from(self.fd) << 32,
            self.nonce,
            u64::from(self.slot) | (self.kind as u64) << 32,
            self.id,
            self.pid_namespace,
            self.shared_memory,
        ];
        let mut bytes = [0; 64];
        for (at, word) in words.into_iter().chain([checksum(&words)]).enumerate() {
            bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Whether its exporter is in another pid namespace.
    pub(crate) fn is_far(&self) -> bool {
        self.pid_namespace != pid_namespace()
    }

    /// `None` for bytes that no exporter made, and for a handle of another kind.
    pub(crate) fn decode(bytes: &[u8; 64], kind: HandleKind) -> Option<Self> {
        let word = |at: usize| u64_at(bytes, at);
        let mut words: [u64; 7] = std::array::from_fn(word);
        words[0] &= !IGNORED;
        if words[0] != MAGIC || word(7) != checksum(&words) || words[3] >> 32 != kind as u64 {
            return None;
        }
        Some(Self {
            kind,
            pid: words[1] as u32,
            fd: (words[1] >> 32) as u32,
            nonce: words[2],
            slot: words[3] as u32,
            id: words[4],
            pid_namespace: words[5],
            shared_memory: words[6],
        })
    }
}

/// What is in a slot now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nothing, or nothing any more.
    Empty,
    /// A block that has not been exported.
    Private,
    /// A block that has.
    Memory {
        id: u64,
        block: u64,
        offset: u64,
        size: u64,
    },
    Event {
        id: u64,
        engine: [u8; 64],
    },
}

/// The table of this process.
#[derive(Debug)]
pub(crate) struct Directory {
    file: OwnedFd,
    words: &'static [AtomicU64],
    nonce: u64,
    by_address: HashMap<u64, u32>,
    used: u32,
    /// Slots of events that have gone.
    free: Vec<u32>,
}

impl Directory {
    /// An empty table, and the thread that serves it to other pid namespaces.
    pub(crate) fn new() -> Result<Self> {
        let system = |_| Status::OPERATING_SYSTEM;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("device-ipc-sim-cuda", flags).map_err(system)?;
        let len = SLOTS * SLOT_BYTES;
        ftruncate(&file, len as u64).map_err(system)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(system)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let at = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &file, 0) };
        let at = at.map_err(system)?.cast_const().cast::<AtomicU64>();
        // SAFETY: mapped for the life of the process, aligned to a page, as long as this, and never shrinks (sealed).
        let words = unsafe { std::slice::from_raw_parts(at, len / 8) };
        let nonce = getrandom::u64().map_err(|_| Status::OPERATING_SYSTEM)?;
        portal::serve(nonce, &file)?;
        Ok(Self { file, words, nonce, by_address: HashMap::new(), used: 0, free: Vec::new() })
    }

    /// Notes that a block now begins at an address. Where one was exported before, others must not take this one
    /// for exported.
    pub(crate) fn arrived(&mut self, address: u64) {
        if let Some(&slot) = self.by_address.get(&address) {
            self.write(slot, Entry::Private);
        }
    }

    /// Notes that the block at an address has gone.
    pub(crate) fn freed(&mut self, address: u64) {
        if let Some(&slot) = self.by_address.get(&address) {
            self.write(slot, Entry::Empty);
        }
    }

    /// Exports the block at an address.
    pub(crate) fn export_memory(&mut self, address: u64, entry: Entry, id: u64) -> Result<[u8; 64]> {
        let slot = match self.by_address.get(&address) {
            Some(&slot) => slot,
            None => {
                let slot = self.new_slot()?;
                self.by_address.insert(address, slot);
                slot
            }
        };
        self.write(slot, entry);
        Ok(self.handle(HandleKind::Memory, slot, id))
    }

    /// Exports an event: its slot, and the bytes that name it.
    pub(crate) fn export_event(
        &mut self,
        slot: Option<u32>,
        engine: [u8; 64],
        id: u64,
    ) -> Result<(u32, [u8; 64])> {
        let slot = slot.map_or_else(|| self.new_slot(), Ok)?;
        self.write(slot, Entry::Event { id, engine });
        Ok((slot, self.handle(HandleKind::Event, slot, id)))
    }

    /// Empties the slot of an event.
    pub(crate) fn retire(&mut self, slot: u32) {
        self.write(slot, Entry::Empty);
        self.free.push(slot);
    }

    fn new_slot(&mut self) -> Result<u32> {
        if let Some(slot) = self.free.pop() {
            return Ok(slot);
        }
        if (self.used as usize) < SLOTS {
            self.used += 1;
            return Ok(self.used - 1);
        }
        // A place whose block has gone: handles of it name nothing, and then something else.
        let empty = self.by_address.iter().find(|(_, slot)| read(&self.file, **slot) == Ok(Entry::Empty));
        let (&address, &slot) = empty.ok_or(Status::OUT_OF_MEMORY)?;
        self.by_address.remove(&address);
        Ok(slot)
    }

    fn handle(&self, kind: HandleKind, slot: u32, id: u64) -> [u8; 64] {
        let handle = Handle {
            kind,
            pid: std::process::id(),
            fd: self.file.as_raw_fd().unsigned_abs(),
            nonce: self.nonce,
            slot,
            id,
            pid_namespace: pid_namespace(),
            shared_memory: shared_memory(),
        };
        handle.encode()
    }

    /// Writes a slot. Its first word is odd meanwhile, and another one afterwards.
    fn write(&mut self, slot: u32, entry: Entry) {
        let words = &self.words[slot as usize * WORDS..][..WORDS];
        let sequence = words[0].load(Ordering::Relaxed);
        words[0].store(sequence + 1, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::Release);
        let mut contents = [0_u64; WORDS];
        contents[1] = self.nonce;
        match entry {
            Entry::Empty => {}
            Entry::Private => contents[2] = 1,
            Entry::Memory { id, block, offset, size } => {
                contents[2..7].copy_from_slice(&[2, id, block, offset, size]);
            }
            Entry::Event { id, engine } => {
                contents[2..4].copy_from_slice(&[3, id]);
                for (at, word) in contents[8..].iter_mut().enumerate() {
                    *word = u64_at(&engine, at);
                }
            }
        }
        for (word, value) in words.iter().zip(contents).skip(1) {
            word.store(value, Ordering::Relaxed);
        }
        words[0].store(sequence + 2, Ordering::Release);
    }
}

/// Another process's table.
#[derive(Debug)]
pub(crate) struct Exporter {
    file: OwnedFd,
    /// Whether it is reached by asking it, since it is not in this `/proc`.
    pub(crate) far: bool,
}

impl Exporter {
    /// Reaches the process that made a handle.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if it has ended, `INVALID_CONTEXT` if it is taken for this process, by its pid.
    pub(crate) fn reach(handle: &Handle) -> Result<Self> {
        if handle.pid == std::process::id() {
            return Err(Status::INVALID_CONTEXT);
        }
        if handle.is_far() {
            let file = portal::ask(handle.nonce, portal::DIRECTORY)?;
            return Ok(Self { file, far: true });
        }
        let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
        let target = std::fs::read_link(&path).map_err(|_| Status::INVALID_HANDLE)?;
        if !target.to_string_lossy().starts_with("/memfd:device-ipc-sim-cuda") {
            return Err(Status::INVALID_HANDLE);
        }
        let file = open(path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok(Self { file: file.map_err(|_| Status::INVALID_HANDLE)?, far: false })
    }

    /// What is now in the place that a handle names.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if this is another process, which has got the pid.
    pub(crate) fn entry(&self, handle: &Handle) -> Result<Entry> {
        let nonce = read_words(&self.file, handle.slot)?[1];
        if nonce != handle.nonce {
            return Err(Status::INVALID_HANDLE);
        }
        read(&self.file, handle.slot)
    }
}

/// Reads a slot in one state.
fn read_words(file: &OwnedFd, slot: u32) -> Result<[u64; WORDS]> {
    loop {
        let mut bytes = [0; SLOT_BYTES];
        let mut again = [0; 8];
        let at = u64::from(slot) * SLOT_BYTES as u64;
        let whole = pread(file, &mut bytes, at) == Ok(SLOT_BYTES) && pread(file, &mut again, at) == Ok(8);
        if !whole {
            return Err(Status::INVALID_HANDLE);
        }
        let sequence = u64_at(&bytes, 0);
        if sequence.is_multiple_of(2) && sequence.to_le_bytes() == again {
            return Ok(std::array::from_fn(|at| u64_at(&bytes, at)));
        }
        std::hint::spin_loop();
    }
}

fn read(file: &OwnedFd, slot: u32) -> Result<Entry> {
    let words = read_words(file, slot)?;
    let mut engine = [0; 64];
    for (at, word) in words[8..].iter().enumerate() {
        engine[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    Ok(match words[2] {
        1 => Entry::Private,
        2 => Entry::Memory { id: words[3], block: words[4], offset: words[5], size: words[6] },
        3 => Entry::Event { id: words[3], engine },
        _ => Entry::Empty,
    })
}

/// Which pid namespace this process is in.
fn pid_namespace() -> u64 {
    stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}

/// Which `/dev/shm` this process has; 0 for none.
pub(crate) fn shared_memory() -> u64 {
    stat("/dev/shm").map_or(0, |stat| stat.st_dev ^ stat.st_ino.rotate_left(32))
}

fn u64_at(bytes: &[u8], word: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| bytes[word * 8 + at]))
}

/// FNV-1a over the words: tells accidents, not forgery.
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

    #[test]
    fn a_handle_is_read_back_and_every_changed_bit_after_the_first_byte_is_told() {
        let handle = Handle {
            kind: HandleKind::Memory,
            pid: 77,
            fd: 300,
            nonce: 0x1234_5678_9abc_def0,
            slot: 9,
            id: 5,
            pid_namespace: 4_026_531_836,
            shared_memory: 22,
        };
        let bytes = handle.encode();
        assert_eq!(Handle::decode(&bytes, HandleKind::Memory), Some(handle));
        assert_eq!(Handle::decode(&bytes, HandleKind::Event), None);
        for bit in 0..512 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            let expected = (bit < 8).then_some(handle);
            assert_eq!(Handle::decode(&changed, HandleKind::Memory), expected, "bit {bit}");
        }
        assert_eq!(Handle::decode(&[0; 64], HandleKind::Memory), None);
    }
}
