//! Host memory that devices access: page-locked, registered, managed ("Memory Management" in `cuda.h`).

use std::ffi::{c_uint, c_void};

use device_ipc_mock_engine::{Address, Machine};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::capture::reject_unsafe_call;
use crate::context::{Context, current};
use crate::entry::driver;
use crate::ffi::Out;
use crate::memory::{Block, Kind};
use crate::simulator::{Objects, Simulator, simulator};
use crate::status::{Result, Status};

/// A block of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostBlock {
    pub(crate) registered: bool,
    pub(crate) managed: bool,
    pub(crate) flags: c_uint,
    /// Number of bytes that were mapped for the block; 0 for registered memory.
    pub(crate) mapped: usize,
}

/// Removed host memory that running work may still access.
#[derive(Debug)]
#[must_use]
pub(crate) struct RetiredHostMemory {
    pub(crate) base: u64,
    pub(crate) mapped: usize,
}

impl RetiredHostMemory {
    /// Waits for that work, and unmaps the memory.
    pub(crate) fn give_back(self, machine: &Machine) {
        let unregistered = machine.unregister_host(Address::new(self.base));
        if self.mapped > 0 && unregistered.is_ok() {
            // SAFETY: mapped by `host_memory`; its owner has freed it, and no work uses it.
            let _ = unsafe { munmap(self.base as *mut c_void, self.mapped) };
        }
    }
}

/// Maps host memory and registers it for the devices.
fn host_memory(simulator: &Simulator, len: usize, flags: c_uint, managed: bool) -> Result<u64> {
    let context = current()?;
    reject_unsafe_call()?;
    if len == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let mapped = len.next_multiple_of(4096);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
    let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, protection, MapFlags::PRIVATE) };
    let base = memory.map_err(|_| Status::OUT_OF_MEMORY)? as u64;
    // SAFETY: mapped above, and unmapped only after it was unregistered.
    unsafe { simulator.machine.register_host(Address::new(base), len as u64) }?;
    let host = HostBlock { registered: false, managed, flags, mapped };
    add_host(simulator, &context, base, len, host);
    Ok(base)
}

fn add_host(simulator: &Simulator, context: &Context, base: u64, len: usize, host: HostBlock) {
    let mut objects = simulator.objects();
    let id = objects.memory.next_id();
    let (device, size) = (context.device, len as u64);
    let kind = Kind::Host(host);
    objects.memory.insert(Block { base, size, device, context: context.handle, id, kind });
}

fn remove_host(address: u64, registered: bool, refused: Status) -> Result {
    let context = current()?;
    reject_unsafe_call()?;
    let simulator = simulator()?;
    let is_it = |objects: &Objects| match objects.memory.blocks.get(&address).map(|block| &block.kind) {
        Some(Kind::Host(host)) if host.registered == registered && !host.managed => Ok(()),
        _ => Err(refused),
    };
    is_it(&simulator.objects())?;
    context.synchronize_exclusively()?;
    let mut objects = simulator.objects();
    is_it(&objects)?;
    let Objects { memory, pools, .. } = &mut *objects;
    let remains = memory.remove(&simulator.machine, address, pools, None);
    drop(objects);
    if let Some(remains) = remains {
        remains.give_back(&simulator.machine);
    }
    Ok(())
}

driver! {
    /// Allocates managed memory.
    fn cuMemAllocManaged(out: Out<u64>, size: usize, flags: c_uint) {
        // CU_MEM_ATTACH_GLOBAL, CU_MEM_ATTACH_HOST
        if !matches!(flags, 1 | 2) {
            return Err(Status::INVALID_VALUE);
        }
        out.put(host_memory(simulator()?, size, flags, true)?)
    }

    /// Allocates page-locked host memory.
    fn cuMemHostAlloc(out: Out<u64>, size: usize, flags: c_uint) {
        out.put(host_memory(simulator()?, size, flags, false)?)
    }

    /// Allocates page-locked host memory without flags.
    fn cuMemAllocHost_v2(out: Out<u64>, size: usize) {
        out.put(host_memory(simulator()?, size, 0, false)?)
    }

    /// Frees page-locked host memory, after all work.
    fn cuMemFreeHost(address: u64) {
        remove_host(address, false, Status::INVALID_VALUE)
    }

    /// Page-locks host memory of the program.
    fn cuMemHostRegister_v2(address: u64, size: usize, flags: c_uint) {
        let context = current()?;
        let simulator = simulator()?;
        if address == 0 || size == 0 || flags & !0xf != 0 {
            return Err(Status::INVALID_VALUE);
        }
        {
            let objects = simulator.objects();
            let end = address.checked_add(size as u64).ok_or(Status::INVALID_VALUE)?;
            let last = objects.memory.blocks.range(..end).next_back();
            if last.is_some_and(|(_, block)| block.end() > address) {
                return Err(Status::HOST_MEMORY_ALREADY_REGISTERED);
            }
        }
        // SAFETY: the caller keeps the memory until it unregisters it, as `cuda.h` requires.
        unsafe { simulator.machine.register_host(Address::new(address), size as u64) }?;
        let host = HostBlock { registered: true, managed: false, flags, mapped: 0 };
        add_host(simulator, &context, address, size, host);
        Ok(())
    }

    /// Unregisters host memory.
    fn cuMemHostUnregister(address: u64) {
        remove_host(address, true, Status::HOST_MEMORY_NOT_REGISTERED)
    }

    /// Returns the device address of host memory, which is its host address.
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: u64, flags: c_uint) {
        current()?;
        let objects = simulator()?.objects();
        let block = objects.memory.find(address).filter(|block| matches!(block.kind, Kind::Host(_)));
        if flags != 0 || block.is_none() {
            return Err(Status::INVALID_VALUE);
        }
        out.put(address)
    }

    /// Returns the flags with which host memory was allocated.
    fn cuMemHostGetFlags(out: Out<c_uint>, address: u64) {
        current()?;
        let objects = simulator()?.objects();
        match objects.memory.find(address).map(|block| &block.kind) {
            Some(Kind::Host(host)) => out.put(host.flags),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}
