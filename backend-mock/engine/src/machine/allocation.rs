//! Allocations of this process, and queries of addresses.
//!
//! `free` waits for the streams of the device, as a driver's free does. Programs hang in destructors because of
//! that, which an engine whose free returns at once would hide.

use std::collections::HashSet;
use std::sync::Arc;

use super::state::{Device, Machine};
use crate::memory::{AddressSource, Arena, MappedObject, Mapping, OwnedAllocation, wait_for_importers};
use crate::model::{Address, EngineError, Lifetime, Operation};
use crate::shared::{Identity, Object, ObjectKind, node};
use crate::system::{lock, page_size, whole_pages};

/// Ratio of the address space of a device to its memory, so that fragmentation does not matter.
const ADDRESSES_PER_BYTE: u64 = 4;

/// The range that contains an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeInfo {
    /// Ordinal of the device in whose address space the range is. For opened memory that is the device that it was
    /// opened on; the home device is not reported, as with CUDA.
    pub device: usize,
    /// First address of the allocation or mapping.
    pub base: Address,
    /// Size in bytes, as requested at the allocation.
    pub size: u64,
    /// A number that no other allocation of the exporting process has had;
    /// `None` if [`MachineConfig::generations`](crate::MachineConfig::generations) is off.
    pub generation: Option<u64>,
    /// Whether it was opened from another process.
    pub imported: bool,
}

impl Machine {
    /// Allocates `size` bytes on a device. The base is aligned to a page, and the contents are zero.
    ///
    /// Consecutive allocations are adjacent if their sizes are whole pages. An allocation of the size of the one
    /// that was freed before gets its address.
    ///
    /// # Errors
    /// `InvalidDevice`; `InvalidValue` for 0 bytes; `OutOfMemory`; `System`.
    pub fn allocate(&self, device: usize, size: u64) -> Result<Address, EngineError> {
        self.allocate_aligned(device, size, 1)
    }

    /// Allocates `size` bytes at a multiple of `alignment` bytes (a power of two, rounded up to a page).
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate), and `InvalidValue` for another alignment.
    pub fn allocate_aligned(&self, device: usize, size: u64, alignment: u64) -> Result<Address, EngineError> {
        self.allocate_with(device, size, alignment, self.config.lifetime)
    }

    /// Allocates `size` bytes at a multiple of `alignment` bytes, with another lifetime than the machine's.
    ///
    /// # Errors
    /// As [`allocate_aligned`](Self::allocate_aligned).
    pub fn allocate_with(
        &self,
        device: usize,
        size: u64,
        alignment: u64,
        lifetime: Lifetime,
    ) -> Result<Address, EngineError> {
        self.enter(Operation::Allocate)?;
        let alignment = usize::try_from(alignment).ok().filter(|alignment| alignment.is_power_of_two());
        let alignment = alignment
            .ok_or_else(|| EngineError::invalid_value("an alignment that is no power of two"))?
            .max(page_size());
        let home = self.device(device)?;
        if size == 0 {
            return Err(EngineError::invalid_value("an allocation of 0 bytes"));
        }
        let mut memory = lock(&self.memory);
        let free = home.memory_bytes.saturating_sub(memory.used[device]);
        let refused = EngineError::OutOfMemory { device, requested: whole_pages(size).unwrap_or(size), free };
        let rounded = whole_pages(size).filter(|&rounded| rounded <= free).ok_or_else(|| refused.clone())?;
        let length = usize::try_from(rounded).map_err(|_| refused.clone())?;
        let arena = arena_of(home)?;
        let identity = Identity {
            kind: ObjectKind::Memory,
            owner: self.process,
            id: self.next_generation(),
            size,
            physical: home.physical as u32,
            lifetime,
        };
        let Object { file, page, .. } = Object::create(identity, rounded, &self.tag(home, rounded))?;
        let offset = arena.take_aligned(length, alignment).ok_or(refused)?;
        let content = MappedObject { file: &file, page, identity, device, writable: true, imported: false };
        let mapping = Arc::new(Mapping::new(AddressSource::Arena(arena), offset, length, content)?);
        let base = mapping.base();
        memory.used[device] += rounded;
        memory.ranges.insert(mapping);
        memory.owned.insert(base, OwnedAllocation { file, rounded, separate: HashSet::new() });
        Ok(Address::new(base))
    }

    /// Frees an allocation of this process, after all work of its streams on the device, also unrelated work. With
    /// [`Lifetime::Revoking`] importers lose the memory; otherwise they keep it.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`, `Imported`; `NotPermitted` from a host function.
    pub fn free(&self, address: Address) -> Result<(), EngineError> {
        self.enter_waiting(Operation::Free)?;
        let device = lock(&self.memory).own(address)?.0.device;
        self.wait_for_device(device);
        self.release_allocation(address)
    }

    /// Frees an allocation without waiting for streams of this process: queued work that uses the memory fails.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`, `Imported`.
    pub fn free_without_waiting(&self, address: Address) -> Result<(), EngineError> {
        self.enter(Operation::Free)?;
        self.release_allocation(address)
    }

    fn release_allocation(&self, address: Address) -> Result<(), EngineError> {
        let mut memory = lock(&self.memory);
        let mapping = memory.own(address)?.0.clone();
        let device = mapping.device;
        memory.ranges.remove(address.get());
        let owned = memory.owned.remove(&address.get());
        let Some(OwnedAllocation { file, rounded, .. }) = owned else {
            return Err(EngineError::UnknownAddress { address });
        };
        memory.used[device] -= rounded;
        mapping.mark_closed();
        mapping.page.mark_freed();
        if mapping.identity.lifetime == Lifetime::Revoking {
            // Other threads may allocate meanwhile, but must not get the descriptor number of this file yet.
            drop(memory);
            wait_for_importers(&file);
        }
        Ok(())
    }

    /// Returns the range that contains an address.
    ///
    /// # Errors
    /// `UnknownAddress` for host memory that is not registered, null, and memory that was freed or closed.
    pub fn range_of(&self, address: Address) -> Result<RangeInfo, EngineError> {
        self.enter(Operation::RangeOf)?;
        let memory = lock(&self.memory);
        let mapping = memory.ranges.find(address)?;
        Ok(RangeInfo {
            device: mapping.device,
            base: Address::new(mapping.base()),
            size: mapping.size(),
            generation: self.config.generations.then_some(mapping.identity.id),
            imported: mapping.imported,
        })
    }

    /// Returns whether an address is in a range that is reserved for device memory, also where no memory is mapped.
    pub fn is_device_address(&self, address: Address) -> bool {
        let in_arena = self.devices.iter().any(|device| {
            let arena = lock(&device.arena);
            arena.as_ref().is_some_and(|arena| {
                let offset = address.get().checked_sub(arena.space().base() as u64);
                offset.is_some_and(|offset| offset < arena.space().len() as u64)
            })
        });
        in_arena || self.reservation_of(address).is_some()
    }

    /// Returns the free and the total bytes of a device.
    ///
    /// Memory of all processes of the [node](crate::NODE_VARIABLE) counts as used if this process names a node,
    /// else only its own. The limit of allocations applies to each process separately.
    ///
    /// # Errors
    /// `InvalidDevice`.
    pub fn memory_info(&self, device: usize) -> Result<(u64, u64), EngineError> {
        self.enter(Operation::MemoryInfo)?;
        let found = self.device(device)?;
        let used = match &self.node {
            Some(node) => node::used(node, self.config.devices[found.physical].uuid),
            None => lock(&self.memory).used[device],
        };
        Ok((found.memory_bytes.saturating_sub(used), found.memory_bytes))
    }

    /// Returns the suffix of the name of a memory file of a device.
    pub(crate) fn tag(&self, device: &Device, bytes: u64) -> String {
        let uuid = self.config.devices[device.physical].uuid;
        self.node.as_deref().map_or_else(String::new, |node| node::tag(node, uuid, bytes))
    }
}

fn arena_of(device: &Device) -> Result<Arc<Arena>, EngineError> {
    let mut arena = lock(&device.arena);
    if let Some(arena) = &*arena {
        return Ok(arena.clone());
    }
    let length = whole_pages(device.memory_bytes.saturating_mul(ADDRESSES_PER_BYTE)).unwrap_or(u64::MAX);
    let length = usize::try_from(length).map_err(|_| EngineError::invalid_value("a device this large"))?;
    Ok(arena.insert(Arc::new(Arena::new(length)?)).clone())
}
