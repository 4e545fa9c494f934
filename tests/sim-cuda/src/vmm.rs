//! Physical memory and reserved addresses ("Virtual Memory Management" in `cuda.h`).

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};

use device_ipc_mock_engine::{Access, Address, BlockId};

use crate::entry::driver;
use crate::ffi::{AccessDesc, AllocationProp, In, Location, Out};
use crate::memory::{Block, Kind, PAGE, device_of};
use crate::simulator::{Objects, simulator};
use crate::status::{Result, Status};

/// `CUmemAllocationHandleType`.
pub(crate) const POSIX_FD: c_int = 1;
pub(crate) const FABRIC: c_int = 8;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const PINNED: c_int = 1;

const FABRIC_MAGIC: &[u8; 8] = b"simfabr\x01";

/// The driver's own ranges are where the host's memory is mapped: from this address on.
const OWN_RANGES: u64 = 0x7000_0000_0000;

/// Ranges from this size on are placed at multiples of it.
const LARGE_RANGE: u64 = 32 << 20;

fn checked(prop: &AllocationProp) -> Result<usize> {
    if prop.kind != PINNED {
        return Err(Status::INVALID_VALUE);
    }
    device_of(prop.location)
}

/// Converts `CUmemAccess_flags` to the engine's access.
pub(crate) fn access(flags: c_int) -> Result<Option<Access>> {
    match flags {
        0 => Ok(None),
        1 => Ok(Some(Access::ReadOnly)),
        3 => Ok(Some(Access::ReadWrite)),
        _ => Err(Status::INVALID_VALUE),
    }
}

/// Converts the engine's access to `CUmemAccess_flags`.
pub(crate) fn flags_of(access: Option<Access>) -> c_int {
    match access {
        None => 0,
        Some(Access::ReadOnly) => 1,
        Some(Access::ReadWrite) => 3,
    }
}

/// Returns the file descriptor in an `osHandle`: its number, cast to a pointer.
pub(crate) fn descriptor(os_handle: *const c_void) -> Result<OwnedFd> {
    let number = i32::try_from(os_handle as usize).map_err(|_| Status::UNKNOWN)?;
    // SAFETY: used during the call only; an invalid descriptor is an error of the duplication below. The caller
    // passed it as one that it has open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    borrowed.try_clone_to_owned().map_err(|_| Status::UNKNOWN)
}

/// Writes a descriptor for the caller.
pub(crate) fn give(out: *mut c_void, fd: OwnedFd) -> Result {
    let out = Out::<c_int>::from_address(out as usize);
    if out.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    out.put(fd.into_raw_fd())
}

fn whole_pages(size: usize) -> Result<u64> {
    let size = size as u64;
    if size == 0 || !size.is_multiple_of(PAGE) { Err(Status::INVALID_VALUE) } else { Ok(size) }
}

driver! {
    /// Returns the unit of sizes and addresses.
    fn cuMemGetAllocationGranularity(out: Out<usize>, prop: In<AllocationProp>, option: c_int) {
        simulator()?;
        checked(&prop.get()?)?;
        if !matches!(option, 0 | 1) {
            return Err(Status::INVALID_VALUE);
        }
        out.put(PAGE as usize)
    }

    /// Creates physical memory.
    fn cuMemCreate(out: Out<u64>, size: usize, prop: In<AllocationProp>, flags: c_ulonglong) {
        let simulator = simulator()?;
        let prop = prop.get()?;
        let device = checked(&prop)?;
        let size = whole_pages(size)?;
        if flags != 0 || prop.handle_types & !(POSIX_FD | FABRIC) != 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if prop.handle_types & FABRIC != 0 && !simulator.config.imex {
            return Err(Status::NOT_PERMITTED);
        }
        let block = simulator.machine.create_block(device, size)?;
        simulator.objects().memory.properties.insert(block.get(), prop);
        out.put(block.get())
    }

    /// Releases a handle. Mappings keep the memory alive.
    fn cuMemRelease(handle: u64) {
        Ok(simulator()?.machine.release_block(BlockId::new(handle))?)
    }

    /// Reserves addresses. The address is a hint. As measured (580.159.04), it is a multiple of the granularity and of the alignment.
    /// Ranges of less than 32 MiB with a smaller alignment are taken from the driver's own ranges, whatever the hint; others are placed
    /// at it if it is a multiple of 32 MiB.
    fn cuMemAddressReserve(out: Out<u64>, size: usize, alignment: usize, wanted: u64, flags: c_ulonglong) {
        let simulator = simulator()?;
        let size = whole_pages(size)?;
        if flags != 0 || (alignment != 0 && !alignment.is_power_of_two()) || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if !wanted.is_multiple_of((alignment as u64).max(PAGE)) {
            return Err(Status::INVALID_VALUE);
        }
        let is_small = size < LARGE_RANGE && (alignment as u64) < LARGE_RANGE;
        let is_hint = if is_small { wanted >= OWN_RANGES } else { wanted != 0 && wanted.is_multiple_of(LARGE_RANGE) };
        if is_hint && simulator.machine.reserve_at(Address::new(wanted), size)? {
            return out.put(wanted);
        }
        out.put(simulator.machine.reserve(size, (alignment as u64).max(PAGE))?.get())
    }

    /// Releases reserved addresses.
    fn cuMemAddressFree(address: u64, size: usize) {
        Ok(simulator()?.machine.unreserve(Address::new(address), size as u64)?)
    }

    /// Maps physical memory at reserved addresses, without access of any device.
    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        let simulator = simulator()?;
        let block = BlockId::new(handle);
        let info = simulator.machine.block_info(block)?;
        let size = size as u64;
        // As measured: only a whole block can be mapped.
        if offset != 0 || size != info.size {
            return Err(Status::NOT_SUPPORTED);
        }
        if flags != 0 || !address.is_multiple_of(PAGE) {
            return Err(Status::INVALID_VALUE);
        }
        let device = info.device.unwrap_or(0);
        simulator.machine.map_block(Address::new(address), size, 0, block)?;
        let mut objects = simulator.objects();
        let id = objects.memory.next_id();
        objects.memory.insert(Block { base: address, size, device, context: 0, id, kind: Kind::Virtual });
        Ok(())
    }

    /// Removes whole mappings.
    fn cuMemUnmap(address: u64, size: usize) {
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        simulator.machine.unmap_blocks(Address::new(address), size as u64)?;
        let end = address + size as u64;
        let Objects { memory, .. } = &mut *objects;
        memory.blocks.retain(|base, _| !(address..end).contains(base));
        Ok(())
    }

    /// Sets the access of devices to whole mappings.
    fn cuMemSetAccess(address: u64, size: usize, descriptions: In<AccessDesc>, count: usize) {
        let simulator = simulator()?;
        for index in 0..count {
            let description = descriptions.at(index)?;
            let device = device_of(description.location)?;
            let access = access(description.flags)?;
            simulator.machine.set_access(Address::new(address), size as u64, device, access)?;
        }
        Ok(())
    }

    /// Returns the access of a device to an address.
    fn cuMemGetAccess(out: Out<c_ulonglong>, location: In<Location>, address: u64) {
        let device = device_of(location.get()?)?;
        let access = simulator()?.machine.access_of(Address::new(address), device)?;
        out.put(flags_of(access) as c_ulonglong)
    }

    /// Exports physical memory as a file descriptor, or as the 64 bytes of a fabric handle.
    fn cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong) {
        let simulator = simulator()?;
        let block = BlockId::new(handle);
        let properties = simulator.objects().memory.properties.get(&handle).copied();
        let offered = properties.ok_or(Status::INVALID_VALUE)?.handle_types;
        if flags != 0 || offered & kind == 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        match kind {
            POSIX_FD => give(out, simulator.machine.export_block_fd(block)?),
            FABRIC => {
                let number = simulator.machine.export_block_number(block)?;
                let mut bytes = [0; 64];
                bytes[..8].copy_from_slice(FABRIC_MAGIC);
                bytes[8..16].copy_from_slice(&number.to_le_bytes());
                Out::from_address(out as usize).put(bytes)
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }

    /// Imports physical memory.
    fn cuMemImportFromShareableHandle(out: Out<u64>, os_handle: *const c_void, kind: c_int) {
        let simulator = simulator()?;
        let machine = &simulator.machine;
        let block = match kind {
            POSIX_FD => machine.import_block_fd(descriptor(os_handle)?).map_err(|_| Status::UNKNOWN)?,
            FABRIC if !simulator.config.imex => return Err(Status::NOT_SUPPORTED),
            FABRIC => {
                let bytes: [u8; 64] = Out::from_address(os_handle as usize).get()?;
                if &bytes[..8] != FABRIC_MAGIC {
                    return Err(Status::INVALID_VALUE);
                }
                machine.import_block_number(u64::from_le_bytes(std::array::from_fn(|at| bytes[8 + at])))?
            }
            _ => return Err(Status::INVALID_VALUE),
        };
        let info = machine.block_info(block)?;
        if info.sparse {
            // The descriptor of a pool.
            machine.release_block(block)?;
            return Err(Status::NOT_SUPPORTED);
        }
        // CU_DEVICE_INVALID if the device is not visible to this process.
        let device = info.device.map_or(-2, |device| device as c_int);
        let location = Location { kind: Location::DEVICE, id: device };
        let prop = AllocationProp { kind: PINNED, handle_types: 0, location, win32: 0, flags: [0; 8] };
        simulator.objects().memory.properties.insert(block.get(), prop);
        out.put(block.get())
    }

    /// Returns an additional handle of the physical memory that is mapped at an address.
    fn cuMemRetainAllocationHandle(out: Out<u64>, address: u64) {
        let simulator = simulator()?;
        {
            let objects = simulator.objects();
            let block = objects.memory.find(address).ok_or(Status::INVALID_VALUE)?;
            if !matches!(block.kind, Kind::Virtual) || out.is_null() {
                return Err(Status::INVALID_VALUE);
            }
        }
        out.put(simulator.machine.retain_block_at(Address::new(address))?.get())
    }

    /// Returns the properties of physical memory.
    fn cuMemGetAllocationPropertiesFromHandle(out: Out<AllocationProp>, handle: u64) {
        let simulator = simulator()?;
        simulator.machine.block_info(BlockId::new(handle))?;
        let properties = simulator.objects().memory.properties.get(&handle).copied();
        out.put(properties.ok_or(Status::INVALID_VALUE)?)
    }
}
