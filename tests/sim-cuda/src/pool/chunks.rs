//! The memory of a pool: addresses and physical pages.
//!
//! Unused pages are returned to the device, and an address later gets other pages. An importer that received the
//! old pages continues to read them, as measured on two H200 with driver 580.159.04.

use std::collections::BTreeMap;

use device_ipc_mock_engine::{Access, Address, BlockId, Machine};

use crate::gaps::Gaps;
use crate::memory::PAGE;
use crate::status::{Result, Status};

/// The unit of small allocations. They share a page; large allocations have separate pages.
const UNIT: u64 = 512;

/// Whole pages that are divided into allocations.
#[derive(Debug)]
struct Chunk {
    /// Offset of the pages in the pool's block.
    physical: u64,
    size: u64,
    gaps: Gaps,
}

/// The chunks of a pool of this process, by offset from the pool's base, without the first page.
#[derive(Debug)]
pub(super) struct Chunks {
    base: u64,
    block: BlockId,
    addresses: Gaps,
    physical: Gaps,
    /// The pages that were returned to the device last. The device uses other pages next.
    returned: Option<(u64, u64)>,
    chunks: BTreeMap<u64, Chunk>,
    /// The access of devices to all chunks.
    access: BTreeMap<usize, Access>,
    reserved: u64,
}

fn unit_of(size: u64) -> u64 {
    if size < PAGE { UNIT } else { PAGE }
}

impl Chunks {
    pub(super) fn new(base: u64, block: BlockId, size: u64) -> Self {
        Self {
            base,
            block,
            addresses: Gaps::new(PAGE, size),
            physical: Gaps::new(PAGE, size),
            returned: None,
            chunks: BTreeMap::new(),
            access: BTreeMap::new(),
            reserved: 0,
        }
    }

    /// Returns the bytes that the pool has reserved on the device.
    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Returns the accounted size of an allocation.
    pub(super) fn rounded(size: u64) -> u64 {
        size.next_multiple_of(UNIT)
    }

    /// Returns the offset in the pool's block for an offset from its base.
    pub(super) fn physical(&self, offset: u64) -> Option<u64> {
        let (start, chunk) = self.chunks.range(..=offset).next_back()?;
        Some(chunk.physical + (offset - start)).filter(|_| offset - start < chunk.size)
    }

    /// Allocates at the lowest offset with room.
    pub(super) fn take(&mut self, machine: &Machine, size: u64) -> Result<u64> {
        let unit = unit_of(size);
        for (offset, chunk) in &mut self.chunks {
            if (unit == PAGE || chunk.size == PAGE)
                && let Some(inner) = chunk.gaps.take(size, unit)
            {
                return Ok(offset + inner);
            }
        }
        let whole = size.checked_next_multiple_of(PAGE).ok_or(Status::OUT_OF_MEMORY)?;
        let offset = match self.grow(machine, whole) {
            Err(Status::OUT_OF_MEMORY) => {
                self.trim(machine, 0);
                self.make_available();
                self.grow(machine, whole)?
            }
            grown => grown?,
        };
        if let Some(chunk) = self.chunks.get_mut(&offset) {
            let _ = chunk.gaps.take(size, unit);
        }
        Ok(offset)
    }

    /// Frees an allocation. Unused pages stay reserved while the pool has no more than `keep` bytes.
    pub(super) fn give_back(&mut self, machine: &Machine, offset: u64, size: u64, keep: u64) {
        let Some((&start, chunk)) = self.chunks.range_mut(..=offset).next_back() else { return };
        chunk.gaps.give_back(offset - start, size, unit_of(size));
        self.trim(machine, keep);
    }

    /// Releases unused pages until the pool has no more than `keep` bytes.
    pub(super) fn trim(&mut self, machine: &Machine, keep: u64) {
        while self.reserved > keep {
            let unused = self.chunks.iter().find(|(_, chunk)| chunk.gaps.is_whole());
            let Some(offset) = unused.map(|(offset, _)| *offset) else { return };
            self.release(machine, offset);
        }
    }

    /// Sets the access of a device to all present and future chunks.
    pub(super) fn set_access(&mut self, machine: &Machine, device: usize, access: Option<Access>) -> Result {
        for (offset, chunk) in &self.chunks {
            machine.set_access(Address::new(self.base + offset), chunk.size, device, access)?;
        }
        match access {
            Some(access) => self.access.insert(device, access),
            None => self.access.remove(&device),
        };
        Ok(())
    }

    fn grow(&mut self, machine: &Machine, size: u64) -> Result<u64> {
        let offset = self.addresses.take(size, PAGE).ok_or(Status::OUT_OF_MEMORY)?;
        let Some(physical) = self.physical.take(size, PAGE) else {
            self.addresses.give_back(offset, size, PAGE);
            return Err(Status::OUT_OF_MEMORY);
        };
        self.reserved += size;
        self.chunks.insert(offset, Chunk { physical, size, gaps: Gaps::new(0, size) });
        self.map(machine, offset, size, physical).inspect_err(|_| self.release(machine, offset))?;
        Ok(offset)
    }

    fn map(&self, machine: &Machine, offset: u64, size: u64, physical: u64) -> Result {
        let address = Address::new(self.base + offset);
        machine.map_block(address, size, physical, self.block)?;
        for (device, access) in &self.access {
            machine.set_access(address, size, *device, Some(*access))?;
        }
        Ok(())
    }

    fn release(&mut self, machine: &Machine, offset: u64) {
        let Some(chunk) = self.chunks.remove(&offset) else { return };
        let _ = machine.unmap_blocks(Address::new(self.base + offset), chunk.size);
        self.reserved -= chunk.size;
        self.addresses.give_back(offset, chunk.size, PAGE);
        self.make_available();
        self.returned = Some((chunk.physical, chunk.size));
    }

    fn make_available(&mut self) {
        if let Some((physical, size)) = self.returned.take() {
            self.physical.give_back(physical, size, PAGE);
        }
    }

    /// Releases all pages, used or not.
    pub(super) fn release_all(&mut self, machine: &Machine) {
        while let Some(offset) = self.chunks.keys().next().copied() {
            self.release(machine, offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use device_ipc_mock_engine::MachineConfig;

    use super::*;

    const LARGE: u64 = 2 * PAGE;

    /// Creates a machine, and a pool on it with 4 pages besides the first.
    fn pool() -> (Arc<Machine>, Chunks) {
        let machine = Machine::new(MachineConfig::default());
        let size = 5 * PAGE;
        let block = machine.create_sparse_block(0, size).expect("a block");
        let base = machine.reserve(size, PAGE).expect("addresses");
        (machine, Chunks::new(base.get(), block, size))
    }

    #[test]
    fn reused_address_has_other_memory() {
        let (machine, mut chunks) = pool();
        let first = chunks.take(&machine, LARGE).expect("room");
        let behind = chunks.physical(first);
        chunks.give_back(&machine, first, LARGE, 0);
        assert_eq!((chunks.reserved(), chunks.physical(first)), (0, None));
        assert_eq!(chunks.take(&machine, LARGE), Ok(first));
        assert_ne!(chunks.physical(first), behind);
    }

    #[test]
    fn unused_memory_below_threshold_is_reused() {
        let (machine, mut chunks) = pool();
        let first = chunks.take(&machine, LARGE).expect("room");
        let behind = chunks.physical(first);
        chunks.give_back(&machine, first, LARGE, LARGE);
        assert_eq!(chunks.reserved(), LARGE);
        assert_eq!(chunks.take(&machine, LARGE), Ok(first));
        assert_eq!(chunks.physical(first), behind);
        chunks.give_back(&machine, first, LARGE, LARGE);
        chunks.trim(&machine, LARGE - 1);
        assert_eq!(chunks.reserved(), 0);
    }

    #[test]
    fn small_allocations_share_page_until_last_is_freed() {
        let (machine, mut chunks) = pool();
        let both = [1000, 1000].map(|size| chunks.take(&machine, size).expect("room"));
        assert_eq!((both, chunks.reserved()), ([PAGE, PAGE + 1024], PAGE));
        chunks.give_back(&machine, both[0], 1000, 0);
        assert_eq!((chunks.reserved(), chunks.take(&machine, 512)), (PAGE, Ok(both[0])));
        chunks.give_back(&machine, both[0], 512, 0);
        chunks.give_back(&machine, both[1], 1000, 0);
        assert_eq!(chunks.reserved(), 0);
    }

    #[test]
    fn whole_pool_can_be_allocated_again() {
        let (machine, mut chunks) = pool();
        for keep in [0, u64::MAX] {
            let parts = [LARGE, LARGE].map(|size| chunks.take(&machine, size).expect("room"));
            assert_eq!(chunks.take(&machine, 1), Err(Status::OUT_OF_MEMORY));
            for offset in parts {
                chunks.give_back(&machine, offset, LARGE, keep);
            }
        }
        assert_eq!(chunks.take(&machine, 4 * PAGE), Ok(PAGE), "kept pages are reused");
    }

    #[test]
    fn access_applies_to_later_allocations() {
        let (machine, mut chunks) = pool();
        chunks.set_access(&machine, 0, Some(Access::ReadWrite)).expect("a device");
        let offset = chunks.take(&machine, 1).expect("room");
        let at = |chunks: &Chunks| machine.access_of(Address::new(chunks.base + offset), 0);
        assert_eq!(at(&chunks), Ok(Some(Access::ReadWrite)));
        chunks.set_access(&machine, 0, None).expect("a device");
        assert_eq!(at(&chunks), Ok(None));
    }
}
