//! Checked ranges of device memory, through which streams access it.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, madvise};

use super::lease::AccessGuard;
use super::mapping::Mapping;
use crate::model::{Address, EngineError};
use crate::system::page_size;

/// Bytes in one mapping or in several adjacent ones, which the span keeps alive.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    address: Address,
    len: usize,
    pieces: Vec<Arc<Mapping>>,
}

impl Span {
    /// Creates a span.
    ///
    /// # Safety
    /// The bytes `address .. address + len` lie within `pieces`, which are adjacent.
    pub(crate) unsafe fn new(address: Address, len: usize, pieces: Vec<Arc<Mapping>>) -> Self {
        Self { address, len, pieces }
    }

    /// Returns the mappings that contain the bytes.
    pub(crate) fn pieces(&self) -> &[Arc<Mapping>] {
        &self.pieces
    }

    /// Acquires the right to access the bytes by work on `device`.
    ///
    /// # Errors
    /// `IllegalAddress` if the memory was freed or closed, `Revoked`, `ReadOnly`.
    fn acquire(&self, device: usize, write: bool) -> Result<Vec<AccessGuard<'_>>, EngineError> {
        self.pieces.iter().map(|piece| piece.acquire(device, write)).collect()
    }

    fn pointer(&self) -> *mut u8 {
        self.address.get() as *mut u8
    }

    /// Copies all bytes of `source`, which has the same length. The two may overlap.
    pub(crate) fn copy_from(&self, source: &Span, device: usize) -> Result<(), EngineError> {
        assert_eq!(self.len, source.len, "spans of one copy have one length");
        let _source_guard = source.acquire(device, false)?;
        let _guard = self.acquire(device, true)?;
        // SAFETY: both spans lie in mapped memory (their pieces keep it mapped) that is writable where it is written
        // (checked by `acquire`) and cannot shrink (sealed). No references into it exist; other processes and streams
        // may access it concurrently, which tears bytes as on a device.
        unsafe { ptr::copy(source.pointer(), self.pointer(), self.len) };
        Ok(())
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, byte: u8, device: usize) -> Result<(), EngineError> {
        let _guard = self.acquire(device, true)?;
        let cleared = if byte == 0 { self.clear_pages() } else { 0..0 };
        for part in [0..cleared.start, cleared.end..self.len] {
            // SAFETY: as in `copy_from`; the parts are within the span.
            unsafe { ptr::write_bytes(self.pointer().add(part.start), byte, part.len()) };
        }
        Ok(())
    }

    /// Clears whole pages of a large span by returning their memory to the system, and returns the cleared bytes. So a
    /// program that clears gigabytes and uses little of them needs little memory.
    fn clear_pages(&self) -> std::ops::Range<usize> {
        const MIN_BYTES: usize = 1 << 20;
        let (start, page) = (self.address.get() as usize, page_size());
        let (first, end) = (start.next_multiple_of(page), (start + self.len) / page * page);
        if self.len < MIN_BYTES || self.pieces.iter().any(|piece| piece.is_host()) {
            return 0..0;
        }
        // SAFETY: whole pages of memory files, mapped and writable (`acquire`), which read as zero afterwards.
        let removed = unsafe { madvise(first as *mut _, end - first, Advice::LinuxRemove) };
        if removed.is_ok() { first - start..end - start } else { 0..0 }
    }

    /// Writes `bytes`, which have the length of the span.
    pub(crate) fn write(&self, bytes: &[u8], device: usize) -> Result<(), EngineError> {
        assert_eq!(self.len, bytes.len(), "the bytes fill the span");
        let _guard = self.acquire(device, true)?;
        // SAFETY: as in `copy_from`; `bytes` is borrowed host memory and does not overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(), self.len) };
        Ok(())
    }

    /// Reads every byte.
    pub(crate) fn read(&self, device: usize) -> Result<Vec<u8>, EngineError> {
        let _guard = self.acquire(device, false)?;
        let mut bytes = vec![0; self.len];
        // SAFETY: as in `copy_from`; `bytes` is new and has the length of the span.
        unsafe { ptr::copy_nonoverlapping(self.pointer(), bytes.as_mut_ptr(), self.len) };
        Ok(bytes)
    }

    /// Adds `value` to every byte, wrapping around.
    pub(crate) fn add_u8(&self, value: u8, device: usize) -> Result<(), EngineError> {
        let _guard = self.acquire(device, true)?;
        for index in 0..self.len {
            // SAFETY: as in `copy_from`; `index` is below the length.
            unsafe {
                let at = self.pointer().add(index);
                at.write_volatile(at.read_volatile().wrapping_add(value));
            }
        }
        Ok(())
    }

    /// Adds `value` to every 32-bit float. The address is a multiple of 4.
    pub(crate) fn add_f32(&self, value: f32, device: usize) -> Result<(), EngineError> {
        let _guard = self.acquire(device, true)?;
        let floats = self.pointer().cast::<f32>();
        assert!(floats.is_aligned(), "the caller checks the alignment");
        for index in 0..self.len / size_of::<f32>() {
            // SAFETY: as in `copy_from`; aligned as asserted, and `index` is below the count.
            unsafe {
                let at = floats.add(index);
                at.write_volatile(at.read_volatile() + value);
            }
        }
        Ok(())
    }

    /// Loads the 64-bit word of the span. The address is a multiple of 8.
    pub(crate) fn load(&self, device: usize) -> Result<u64, EngineError> {
        let _guard = self.acquire(device, false)?;
        Ok(self.word().load(Ordering::Acquire))
    }

    /// Stores the 64-bit word of the span with release ordering: a process that reads the value sees all earlier
    /// writes of the stream.
    pub(crate) fn store(&self, value: u64, device: usize) -> Result<(), EngineError> {
        let _guard = self.acquire(device, true)?;
        self.word().store(value, Ordering::Release);
        Ok(())
    }

    /// Replaces the 64-bit word of the span if it is `old`, and returns whether it was.
    pub(crate) fn exchange(&self, old: u64, new: u64, device: usize) -> Result<bool, EngineError> {
        let _guard = self.acquire(device, true)?;
        Ok(self.word().compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Returns the word. Loads are valid on read-only memory, since a word is not larger than a register.
    fn word(&self) -> &AtomicU64 {
        let word = self.pointer().cast::<u64>();
        assert!(word.is_aligned() && self.len == size_of::<u64>(), "the caller checks size and alignment");
        // SAFETY: mapped while the span lives, aligned and large enough as asserted; other processes access the word
        // atomically, or tear it as on a device.
        unsafe { AtomicU64::from_ptr(word) }
    }
}
