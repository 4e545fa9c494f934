//! The directory: a table in a memory file in which a process publishes its exports.
//!
//! A handle names a slot of the table ([`crate::handle`]). The slot has what is there *now*, so that a stale handle
//! can open another block or event, as measured on two H200 with driver 580.159.04. The file is anonymous, so that
//! a killed process leaves nothing behind. Another process opens it through `/proc`, or requests it over a socket
//! if the exporter is not visible there (see [`crate::portal`]).

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use device_ipc_mock_engine::EventId;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};
use rustix::io::pread;
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::handle::{Handle, HandleKind, Place, pid_namespace, shared_memory, u64_at};
use crate::portal;
use crate::simulator::Simulator;
use crate::status::{Result, Status};

const SLOTS: usize = 1 << 16;
/// Words of a slot: sequence and state, number, three words of content, and the engine's handle of an event.
const WORDS: usize = 16;
const SLOT_BYTES: usize = WORDS * 8;

/// The content of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// No object.
    Empty,
    /// A block that is not exported.
    Private,
    /// An exported block.
    Memory { id: u64, block: u64, offset: u64, size: u64 },
    /// An event, or the last one in the slot: the driver does not detect that it was destroyed.
    Event { engine: [u8; 64] },
}

/// The directory of this process.
#[derive(Debug)]
pub(crate) struct Directory {
    file: OwnedFd,
    words: &'static [AtomicU64],
    nonce: u64,
    by_address: HashMap<u64, u32>,
    used: u32,
    /// The engine's event of each event slot. A destroyed event is kept until another one takes the slot.
    events: HashMap<u32, EventId>,
    /// Slots of destroyed events.
    free: Vec<u32>,
}

impl Directory {
    /// Creates an empty directory, and the thread that serves it to other pid namespaces.
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
        // SAFETY: mapped for the life of the process, page-aligned, of this length, and sealed against shrinking.
        let words = unsafe { std::slice::from_raw_parts(at, len / 8) };
        let nonce = getrandom::u64().map_err(|_| Status::OPERATING_SYSTEM)?;
        portal::serve(nonce, &file)?;
        Ok(Self {
            file,
            words,
            nonce,
            by_address: HashMap::new(),
            used: 0,
            events: HashMap::new(),
            free: Vec::new(),
        })
    }

    /// Marks the slot of a new block as not exported, in case an earlier block at its address was.
    pub(crate) fn clear_slot(&mut self, address: u64) {
        if let Some(&slot) = self.by_address.get(&address) {
            self.write(slot, Entry::Private);
        }
    }

    /// Clears the slot of a freed block.
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
        self.handle(HandleKind::Memory, slot, id)
    }

    /// Exports an event. Returns its slot, an existing one if it has one, and the bytes that name it.
    pub(crate) fn export_event(
        &mut self,
        simulator: &Simulator,
        slot: Option<u32>,
        event: EventId,
        id: u64,
    ) -> Result<(u32, [u8; 64])> {
        let engine = simulator.machine.export_event(event)?;
        let slot = match slot.or_else(|| self.free.pop()) {
            Some(slot) => slot,
            None => self.new_slot()?,
        };
        self.write(slot, Entry::Event { engine });
        if let Some(before) = self.events.insert(slot, event).filter(|before| *before != event) {
            simulator.machine.destroy_event(before)?;
        }
        Ok((slot, self.handle(HandleKind::Event, slot, id)?))
    }

    /// Marks the event of a slot as destroyed. Importers find it until another event takes the slot.
    pub(crate) fn retire(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Returns the engine's event in a slot.
    pub(crate) fn event_in(&self, slot: u32) -> Option<EventId> {
        self.events.get(&slot).copied()
    }

    fn new_slot(&mut self) -> Result<u32> {
        if (self.used as usize) < SLOTS {
            self.used += 1;
            return Ok(self.used - 1);
        }
        // The slot of a freed block: its handles name nothing, and later another block.
        let empty = self.by_address.iter().find(|(_, slot)| read(&self.file, **slot) == Ok(Entry::Empty));
        let (&address, &slot) = empty.ok_or(Status::OUT_OF_MEMORY)?;
        self.by_address.remove(&address);
        Ok(slot)
    }

    fn handle(&self, kind: HandleKind, slot: u32, id: u64) -> Result<[u8; 64]> {
        let fd = self.file.as_raw_fd().unsigned_abs();
        let place = Place::new(std::process::id(), fd, self.nonce, slot, id);
        let handle = Handle {
            place: place.ok_or(Status::OPERATING_SYSTEM)?,
            kind,
            id,
            pid_namespace: pid_namespace(),
            shared_memory: shared_memory(),
        };
        Ok(handle.encode())
    }

    /// Writes a slot as a seqlock: its first word is odd during the write.
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
            Entry::Event { engine } => {
                contents[2] = 3;
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

/// The directory of another process.
#[derive(Debug)]
pub(crate) struct Exporter {
    file: OwnedFd,
    /// Whether the exporter is reached over a socket, because it is not in this `/proc`.
    pub(crate) over_socket: bool,
}

impl Exporter {
    /// Opens the directory of the exporter that a handle names, through `/proc` or else over a socket.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if the exporter has exited, `INVALID_CONTEXT` if its pid is the one of this process.
    pub(crate) fn reach(place: &Place) -> Result<Self> {
        if place.pid == std::process::id() {
            return Err(Status::INVALID_CONTEXT);
        }
        match Self::near(place) {
            Ok(near) if near.entry(place).is_ok() => Ok(near),
            _ => Ok(Self { file: portal::ask(place.nonce, portal::DIRECTORY)?, over_socket: true }),
        }
    }

    fn near(place: &Place) -> Result<Self> {
        let path = format!("/proc/{}/fd/{}", place.pid, place.fd);
        let target = std::fs::read_link(&path).map_err(|_| Status::INVALID_HANDLE)?;
        if !target.to_string_lossy().starts_with("/memfd:device-ipc-sim-cuda") {
            return Err(Status::INVALID_HANDLE);
        }
        let file = open(path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok(Self { file: file.map_err(|_| Status::INVALID_HANDLE)?, over_socket: false })
    }

    /// Reads the current content of the slot that a handle names.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if another process has the pid now.
    pub(crate) fn entry(&self, place: &Place) -> Result<Entry> {
        let nonce = read_words(&self.file, place.slot)?[1];
        if nonce != place.nonce {
            return Err(Status::INVALID_HANDLE);
        }
        read(&self.file, place.slot)
    }
}

/// Reads a consistent slot.
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
        3 => Entry::Event { engine },
        _ => Entry::Empty,
    })
}
