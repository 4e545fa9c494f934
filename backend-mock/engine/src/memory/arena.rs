//! Reserved address space.
//!
//! A driver uses the lowest free addresses of a device: a new allocation reuses the addresses of a freed one, and
//! consecutive allocations are adjacent. Both have caused bugs, and both are deterministic here. An importer uses one
//! reservation to map several allocations side by side.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::model::EngineError;

/// A reserved range of addresses of this process.
#[derive(Debug)]
pub(crate) struct Reservation {
    base: usize,
    len: usize,
}

impl Reservation {
    /// Reserves `len` bytes (whole pages, not 0) of address space, without memory.
    pub(crate) fn new(len: usize) -> Result<Self, EngineError> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) }
            .map_err(EngineError::system("mmap"))?;
        Ok(Self { base: base as usize, len })
    }

    /// Reserves `len` bytes from `base` on, both whole pages; `None` if any of these addresses is in use.
    pub(crate) fn at(base: usize, len: usize) -> Result<Option<Self>, EngineError> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the kernel replaces no mapping (mmap(2), MAP_FIXED_NOREPLACE); before Linux 4.17 the address is a hint.
        match unsafe { mmap_anonymous(base as *mut _, len, ProtFlags::empty(), flags) } {
            Ok(found) => {
                let reserved = Self { base: found as usize, len };
                Ok((reserved.base == base).then_some(reserved))
            }
            // Outside of the address space of processes, or below vm.mmap_min_addr.
            Err(Errno::EXIST | Errno::NOMEM | Errno::PERM | Errno::INVAL) => Ok(None),
            Err(error) => Err(EngineError::system("mmap")(error)),
        }
    }

    /// Reserves `len` bytes at a multiple of `alignment` (a power of two, whole pages).
    pub(crate) fn aligned(len: usize, alignment: usize) -> Result<Self, EngineError> {
        let room =
            len.checked_add(alignment).ok_or_else(|| EngineError::invalid_value("a range this large"))?;
        let mut space = Self::new(room)?;
        let base = space.base.next_multiple_of(alignment);
        // Unmap the unused addresses before the base and behind the end.
        let before = base - space.base;
        for (at, len) in [(space.base, before), (base + len, room - len - before)] {
            if len > 0 {
                // SAFETY: part of the mapping above, which has no other user yet.
                unsafe { munmap(at as *mut _, len) }.map_err(EngineError::system("munmap"))?;
            }
        }
        (space.base, space.len) = (base, len);
        Ok(space)
    }

    /// Returns the first address.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Maps `len` bytes of `file` at `file_offset` to `offset`, all in whole pages.
    pub(crate) fn map(
        &self,
        offset: usize,
        len: usize,
        file: impl AsFd,
        file_offset: u64,
        writable: bool,
    ) -> Result<(), EngineError> {
        self.check(offset, len);
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let at = (self.base + offset) as *mut _;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the addresses belong to this reservation (checked), and each part of it is used only once at a
        // time, so no mapping in use is replaced.
        unsafe { mmap(at, len, protection, flags, file, file_offset) }
            .map_err(EngineError::system("mmap"))?;
        Ok(())
    }

    /// Unmaps a part and keeps its addresses reserved.
    ///
    /// # Safety
    /// No code may access these addresses any more.
    pub(crate) unsafe fn clear(&self, offset: usize, len: usize) -> Result<(), EngineError> {
        self.check(offset, len);
        let at = (self.base + offset) as *mut _;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the addresses belong to this reservation, and the caller promises that they are unused.
        unsafe { mmap_anonymous(at, len, ProtFlags::empty(), flags) }.map_err(EngineError::system("mmap"))?;
        Ok(())
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside the reservation");
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped; every mapping inside has an `Arc` of this reservation, so
        // none is left. A failure leaks address space only.
        let _ = unsafe { munmap(self.base as *mut _, self.len) };
    }
}

/// An allocator of the addresses of one device, lowest first.
#[derive(Debug)]
pub(crate) struct Arena {
    space: Reservation,
    /// Free parts: length by offset; no two of them touch.
    free: Mutex<BTreeMap<usize, usize>>,
}

impl Arena {
    /// Reserves an arena of `len` bytes, whole pages.
    pub(crate) fn new(len: usize) -> Result<Self, EngineError> {
        let space = Reservation::new(len)?;
        Ok(Self { space, free: Mutex::new(BTreeMap::from([(0, len)])) })
    }

    /// Returns the reservation.
    pub(crate) fn space(&self) -> &Reservation {
        &self.space
    }

    /// Takes the lowest free part of `len` bytes at a multiple of `alignment`, a power of two. Returns its offset, or
    /// `None` if there is no such gap.
    pub(crate) fn take_aligned(&self, len: usize, alignment: usize) -> Option<usize> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = |offset: usize| {
            let address = self.space.base().checked_add(offset)?;
            Some(address.checked_next_multiple_of(alignment)? - self.space.base())
        };
        let fits = |(&offset, &gap): (&usize, &usize)| {
            let at = begin(offset)?;
            (at.checked_add(len)? <= offset + gap).then_some((offset, gap, at))
        };
        let (offset, gap, at) = free.iter().find_map(fits)?;
        free.remove(&offset);
        for (start, end) in [(offset, at), (at + len, offset + gap)] {
            if start < end {
                free.insert(start, end - start);
            }
        }
        Some(at)
    }

    /// Returns a part to the arena.
    ///
    /// # Safety
    /// No code may access these addresses any more.
    pub(crate) unsafe fn give_back(&self, mut offset: usize, mut len: usize) {
        // SAFETY: promised by the caller.
        if unsafe { self.space.clear(offset, len) }.is_err() {
            // The old memory is still mapped. The part is not used again.
            return;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gap) = free.remove(&(offset + len)) {
            len += gap;
        }
        if let Some((&before, &gap)) = free.range(..offset).next_back()
            && before + gap == offset
        {
            offset = before;
            len += gap;
        }
        free.insert(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::page_size;

    #[test]
    fn lowest_fitting_gap_is_taken_and_gaps_merge() {
        let page = page_size();
        let arena = Arena::new(8 * page).expect("address space");
        let taken: Vec<_> = (0..4).map(|_| arena.take_aligned(2 * page, 1)).collect();
        assert_eq!(taken, [Some(0), Some(2 * page), Some(4 * page), Some(6 * page)]);
        assert_eq!(arena.take_aligned(page, 1), None);
        // SAFETY: nothing was mapped there.
        unsafe {
            arena.give_back(2 * page, 2 * page);
            arena.give_back(6 * page, 2 * page);
            arena.give_back(4 * page, 2 * page);
        }
        assert_eq!(arena.take_aligned(6 * page, 1), Some(2 * page));
    }
}
