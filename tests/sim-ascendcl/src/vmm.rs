//! Physical memory and reserved addresses, shared by a number.
//!
//! Unlike memory that is shared by key, such memory exists until the last process releases it.

use device_ipc_mock_engine::{Access, Address, BlockId};

use crate::abi::{Handle, MemAccessDesc, MemLocation, PhysicalMemProp, Pointer};
use crate::block::{Block, Origin};
use crate::call::calls;
use crate::ipc_event::publish;
use crate::ipc_memory::{list, listable};
use crate::key::{from_number, to_number};
use crate::node::{FoundNode, Kind, Node, Record};
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};

const NORMAL_PAGE: u64 = 4 << 10;
const HUGE_PAGE: u64 = 2 << 20;
const GIANT_PAGE: u64 = 1 << 30;

/// `ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION`, the only flag.
const DISABLE_PID_VALIDATION: u64 = 1;

/// `ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT` and `_FABRIC`.
const SHARE_BY_NUMBER: i32 = 1;
const SHARE_BY_FABRIC: i32 = 2;

/// Size of `aclrtMemFabricHandle` in bytes, and the first bytes of its content.
const FABRIC_BYTES: usize = 128;
const FABRIC_TAG: [u8; 8] = *b"SIMFABR1";

/// A handle of physical memory.
#[derive(Debug)]
pub(crate) struct PhysicalMemory {
    block: BlockId,
    size: u64,
    page: u64,
    /// User id of the device that uses the memory.
    device: usize,
    /// Physical id of the home device.
    home: usize,
    properties: PhysicalMemProp,
    /// The shareable handle by which it was imported.
    imported_by: Option<u64>,
    shared: Option<SharedBlock>,
}

#[derive(Debug)]
struct SharedBlock {
    number: u64,
    node: Node,
    listed_only: bool,
}

impl Simulator {
    /// Returns the page size of an attribute, and the unit of physical memory. The driver allocates in units of 2
    /// MiB whatever the pages are, except for host memory (hicann/driver, `halMemGetAllocationGranularity`).
    fn granularity(&self, properties: &PhysicalMemProp) -> Outcome<(u64, u64)> {
        if properties.location.kind != MemLocation::DEVICE {
            return refuse(
                Status::RT_FEATURE_NOT_SUPPORT,
                "the simulator supports only physical memory of devices",
            );
        }
        self.device(properties.location.id.cast_signed())?;
        if properties.handle_type != 0 || properties.allocation_type != 0 {
            return refuse(Status::RT_PARAM_INVALID, "handleType and allocationType must be 0");
        }
        match properties.attribute {
            0 | 1 | 3 | 5 | 7 | 9 | 12 | 15 => Ok((NORMAL_PAGE, HUGE_PAGE)),
            2 | 4 | 6 | 8 | 13 | 16 => Ok((HUGE_PAGE, HUGE_PAGE)),
            10 | 11 | 14 | 17 => self.require(Feature::HugePagesOf1GiB).map(|()| (GIANT_PAGE, GIANT_PAGE)),
            other => refuse(Status::RT_PARAM_INVALID, format!("invalid kind of memory {other}")),
        }
    }

    fn make_physical(&self, size: usize, properties: PhysicalMemProp) -> Outcome<u64> {
        let (page, granularity) = self.granularity(&properties)?;
        let size = size as u64;
        if size == 0 || !size.is_multiple_of(granularity) {
            return refuse(Status::RT_PARAM_INVALID, format!("size is not a multiple of {granularity}"));
        }
        let device = self.device(properties.location.id.cast_signed())?;
        let block = self.machine.create_block(device, size)?;
        let home = self.physical(device);
        let made =
            PhysicalMemory { block, size, page, device, home, properties, imported_by: None, shared: None };
        let mut state = self.state();
        let handle = state.new_handle();
        state.physical.insert(handle, made);
        Ok(handle)
    }

    fn with_physical<T>(
        &self,
        handle: Handle,
        look: impl FnOnce(&mut PhysicalMemory) -> Outcome<T>,
    ) -> Outcome<T> {
        let value = handle.required("handle")?;
        match self.state().physical.get_mut(&value) {
            Some(found) => look(found),
            None => refuse(Status::RT_INVALID_HANDLE, "physical memory not found"),
        }
    }

    fn map(&self, address: u64, size: u64, handle: Handle) -> Outcome {
        let (block, whole, page, device, home, imported_by) = self.with_physical(handle, |found| {
            Ok((found.block, found.size, found.page, found.device, found.home, found.imported_by))
        })?;
        if size != whole {
            let text = format!("the physical memory must be mapped as a whole, {whole} bytes");
            return refuse(Status::RT_PARAM_INVALID, text);
        }
        if !self.has_access(device, home) {
            let text = format!(
                "device {device} has no access to physical device {home}: call aclrtDeviceEnablePeerAccess"
            );
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        self.require_one_kind(address, device, imported_by.is_some())?;
        self.machine.map_block(Address::new(address), size, 0, block)?;
        self.machine.set_access(Address::new(address), size, device, Some(Access::ReadWrite))?;
        let (origin, for_peers, registered) = (Origin::Mapped, true, false);
        let block =
            Block { base: address, size, page, device, home, for_peers, origin, registered, imported_by };
        self.state().blocks.insert(address, block);
        Ok(())
    }

    /// Checks that a reservation has memory of one device only (hicann/driver,
    /// `devmm_page_bitmap_mem_mapped_state_set`), and only imported memory or only memory of this process (manual
    /// 11-04).
    fn require_one_kind(&self, address: u64, device: usize, imported: bool) -> Outcome {
        let Some((base, size)) = self.machine.reservation_of(Address::new(address)) else { return Ok(()) };
        let state = self.state();
        let others = state.blocks.range(base.get()..base.get().saturating_add(size));
        let mut others = others.map(|(_, block)| block).filter(|block| block.origin == Origin::Mapped);
        if others.clone().any(|other| other.device != device) {
            return refuse(Status::RT_DRV_INTERNAL_ERROR, "the reservation has memory of another device");
        }
        if others.any(|other| other.imported_by.is_some() != imported) {
            let text = "a reservation has either imported memory or memory of this process";
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        Ok(())
    }

    /// Returns the mapping at an address.
    fn mapped(&self, address: u64) -> Outcome<Block> {
        match self.state().blocks.get(&address) {
            Some(block) if block.origin == Origin::Mapped => Ok(*block),
            _ => refuse(Status::RT_PARAM_INVALID, format!("no memory is mapped at {address:#x}")),
        }
    }

    /// Returns the device of a location, which names it by logic id.
    fn device_of_location(&self, location: MemLocation) -> Outcome<usize> {
        let found = self.config.visible.iter().position(|&logic| logic == location.id as usize);
        match found.filter(|_| location.kind == MemLocation::DEVICE) {
            Some(device) => Ok(device),
            None => {
                let text = format!("device {} (logic id) not found", location.id);
                refuse(Status::RT_DRV_INTERNAL_ERROR, text)
            }
        }
    }

    fn share(&self, handle: Handle, flags: u64) -> Outcome<u64> {
        if flags > DISABLE_PID_VALIDATION {
            return refuse(Status::RT_PARAM_INVALID, "flags are 0 or 1");
        }
        let listed_only = flags & DISABLE_PID_VALIDATION == 0;
        if !listed_only && self.config.old_driver {
            return refuse(Status::RT_FEATURE_NOT_SUPPORT, "the driver requires a list of processes");
        }
        let machine = &self.machine;
        self.with_physical(handle, |found| {
            if found.imported_by.is_some() || found.shared.is_some() {
                return refuse(
                    Status::RT_DRV_INTERNAL_ERROR,
                    "physical memory is shared once, by its creator",
                );
            }
            let mut handle = [0; 64];
            handle[..8].copy_from_slice(&machine.export_block_number(found.block)?.to_le_bytes());
            let record = Record {
                kind: Kind::Block,
                physical: found.home as u32,
                size: found.size,
                page: found.page,
                for_peers: true,
                listed_only,
                handle,
            };
            let node = publish(&record)?;
            let number = to_number(std::process::id(), node.reference);
            found.shared = Some(SharedBlock { number, node, listed_only });
            Ok(number)
        })
    }

    fn list_for_shared(&self, number: u64, pids: &[i32]) -> Outcome {
        let mut state = self.state();
        let shared = state
            .physical
            .values_mut()
            .find_map(|found| found.shared.as_mut().filter(|shared| shared.number == number));
        match shared {
            None => refuse(
                Status::RT_DRV_INTERNAL_ERROR,
                "only the process that shared the memory can list processes",
            ),
            Some(shared) if !shared.listed_only => {
                refuse(Status::RT_NO_PERMISSION, "the memory was shared without a list of processes")
            }
            Some(shared) => list(&mut shared.node, &listable(pids)?),
        }
    }

    fn import_shared(&self, number: u64, device: usize) -> Outcome<u64> {
        let (pid, reference) = from_number(number);
        let Some(found) = FoundNode::look_up(pid, reference, Kind::Block) else {
            return refuse(Status::RT_DRV_INTERNAL_ERROR, "the handle is invalid or stale");
        };
        if pid == std::process::id() {
            let text = "physical memory cannot be imported by its creator";
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        if !found.permits_this_process() {
            let text = "this process is not on the list, or started after its pid was listed";
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        {
            // A released handle is valid while it is mapped.
            let state = self.state();
            let by_handle =
                state.physical.values().any(|p| p.imported_by == Some(number) && p.device == device);
            let by_mapping =
                state.blocks.values().any(|b| b.imported_by == Some(number) && b.device == device);
            if by_handle || by_mapping {
                let text = "this process has imported the handle for this device already";
                return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
            }
        }
        let record = found.record;
        let content = u64::from_le_bytes(std::array::from_fn(|index| record.handle[index]));
        let block = self.machine.import_block_number(content)?;
        let (size, page, home) = (record.size, record.page, record.physical as usize);
        let location = MemLocation { id: device as u32, kind: MemLocation::DEVICE };
        let properties = PhysicalMemProp { location, ..PhysicalMemProp::default() };
        let imported_by = Some(number);
        let made = PhysicalMemory { block, size, page, device, home, properties, imported_by, shared: None };
        let mut state = self.state();
        let handle = state.new_handle();
        state.physical.insert(handle, made);
        Ok(handle)
    }

    /// Returns the number in a shareable handle of either type.
    fn number_in(&self, shareable: Handle, kind: i32) -> Outcome<u64> {
        shareable.required("shareableHandle")?;
        match kind {
            SHARE_BY_NUMBER => Pointer::<u64>::at(shareable).get("shareableHandle"),
            SHARE_BY_FABRIC => {
                self.require(Feature::FabricHandles)?;
                let bytes = Pointer::<u8>::at(shareable).list(FABRIC_BYTES, "shareableHandle")?;
                if bytes[..8] != FABRIC_TAG {
                    return refuse(Status::RT_DRV_INTERNAL_ERROR, "the bytes are not a fabric handle");
                }
                Ok(u64::from_le_bytes(std::array::from_fn(|index| bytes[8 + index])))
            }
            other => refuse(Status::RT_PARAM_INVALID, format!("invalid kind of shareable handle {other}")),
        }
    }
}

calls! {
    /// Returns the unit of sizes of physical memory.
    run fn aclrtMemGetAllocationGranularity(sim, properties: Pointer<PhysicalMemProp>, option: i32, size: Pointer<usize>) {
        let properties = properties.get("prop")?;
        size.check("granularity")?;
        if !matches!(option, 0 | 1) {
            return refuse(Status::RT_PARAM_INVALID, "option is 0 or 1");
        }
        let (_, granularity) = sim.granularity(&properties)?;
        size.put(granularity as usize, "granularity")
    }

    /// Creates physical memory.
    run fn aclrtMallocPhysical(
        sim,
        handle: Pointer<Handle>,
        size: usize,
        properties: Pointer<PhysicalMemProp>,
        flags: u64,
    ) {
        handle.check("handle")?;
        let properties = properties.get("prop")?;
        if flags != 0 {
            return refuse(Status::RT_PARAM_INVALID, "flags must be 0");
        }
        sim.current()?;
        let made = sim.make_physical(size, properties)?;
        handle.put(Handle::new(made), "handle")
    }

    /// Releases physical memory; it exists while it is mapped, and while other processes have it.
    run fn aclrtFreePhysical(sim, handle: Handle) {
        let value = handle.required("handle")?;
        let Some(found) = sim.state().physical.remove(&value) else {
            return refuse(Status::RT_INVALID_HANDLE, "physical memory not found");
        };
        Ok(sim.machine.release_block(found.block)?)
    }

    /// Reserves addresses. Those that the caller chooses are a multiple of 1 GiB, and free (manual of CANN 8.5).
    run fn aclrtReserveMemAddress(
        sim,
        pointer: Pointer<Handle>,
        size: usize,
        alignment: usize,
        expected: Handle,
        flags: u64,
    ) {
        pointer.check("virPtr")?;
        if size == 0 || alignment != 0 || flags > 1 {
            return refuse(Status::RT_PARAM_INVALID, "size must not be 0, alignment must be 0, and flags must be 0 or 1");
        }
        sim.current()?;
        if !expected.is_null() {
            let address = Address::new(expected.required("expectPtr")?);
            if !address.get().is_multiple_of(GIANT_PAGE) {
                return refuse(Status::RT_PARAM_INVALID, "expectPtr must be a multiple of 1 GiB");
            }
            if !sim.machine.reserve_at(address, size as u64)? {
                return refuse(Status::RT_MEMORY_ALLOCATION, "the addresses are invalid or in use");
            }
            return pointer.put(expected, "virPtr");
        }
        let base = sim.machine.reserve(size as u64, HUGE_PAGE)?;
        pointer.put(Handle::new(base.get()), "virPtr")
    }

    /// Releases reserved addresses.
    run fn aclrtReleaseMemAddress(sim, pointer: Handle) {
        let address = Address::new(pointer.required("virPtr")?);
        match sim.machine.reservation_of(address) {
            Some((base, size)) if base == address => Ok(sim.machine.unreserve(base, size)?),
            _ => refuse(Status::RT_PARAM_INVALID, "the address is not the base of a reservation"),
        }
    }

    /// Maps a whole block of physical memory, for the device on which it was created or imported.
    run fn aclrtMapMem(sim, pointer: Handle, size: usize, offset: usize, handle: Handle, flags: u64) {
        let address = pointer.required("virPtr")?;
        if offset != 0 || flags != 0 {
            return refuse(Status::RT_PARAM_INVALID, "offset and flags must be 0");
        }
        sim.map(address, size as u64, handle)
    }

    /// Removes a mapping, also with queued work that uses it.
    run fn aclrtUnmapMem(sim, pointer: Handle) {
        let block = sim.mapped(pointer.required("virPtr")?)?;
        sim.state().blocks.remove(&block.base);
        Ok(sim.machine.unmap_blocks(Address::new(block.base), block.size)?)
    }

    /// Gives devices, by logic id, read-write access to a mapping: 3. The driver has no other access
    /// (hicann/driver, `devmm_access_desc_check`), and gives no further device access to imported memory
    /// (`devmm_prefetch_para_check`).
    run fn aclrtMemSetAccess(sim, pointer: Handle, size: usize, access: Pointer<MemAccessDesc>, count: usize) {
        let address = pointer.required("virPtr")?;
        let block = sim.mapped(address)?;
        if size as u64 != block.size || count == 0 {
            return refuse(Status::RT_PARAM_INVALID, "access must be set for a whole mapping");
        }
        for access in access.list(count, "desc")? {
            match access.flags {
                3 => {}
                0 | 1 => {
                    return refuse(Status::RT_FEATURE_NOT_SUPPORT, "the driver supports only read-write access");
                }
                other => return refuse(Status::RT_PARAM_INVALID, format!("no access {other}")),
            }
            if access.location.kind == MemLocation::HOST {
                return refuse(Status::RT_FEATURE_NOT_SUPPORT, "the simulator maps no device memory for the host");
            }
            let device = sim.device_of_location(access.location)?;
            if device != block.device && block.imported_by.is_some() {
                return refuse(Status::RT_DRV_INTERNAL_ERROR, "no further device can access imported memory");
            }
            sim.require_access(device, &block)?;
            sim.machine.set_access(Address::new(address), block.size, device, Some(Access::ReadWrite))?;
        }
        Ok(())
    }

    /// Returns the access of a device to a mapping.
    run fn aclrtMemGetAccess(sim, pointer: Handle, location: Pointer<MemLocation>, flags: Pointer<u64>) {
        let block = sim.mapped(pointer.required("virPtr")?)?;
        let device = sim.device_of_location(location.get("location")?)?;
        let access = sim.machine.access_of(Address::new(block.base), device)?;
        flags.put(access.map_or(0, |access| if access == Access::ReadOnly { 1 } else { 3 }), "flag")
    }

    /// Exports physical memory as a number, once.
    run fn aclrtMemExportToShareableHandle(sim, handle: Handle, kind: i32, flags: u64, shareable: Pointer<u64>) {
        shareable.check("shareableHandle")?;
        if kind != 0 {
            return refuse(Status::RT_PARAM_INVALID, "handleType must be 0");
        }
        let number = sim.share(handle, flags)?;
        shareable.put(number, "shareableHandle")
    }

    /// Exports physical memory as a number, or as 128 bytes for other servers.
    run fn aclrtMemExportToShareableHandleV2(sim, handle: Handle, flags: u64, kind: i32, shareable: Handle) {
        shareable.required("shareableHandle")?;
        match kind {
            SHARE_BY_NUMBER => Pointer::<u64>::at(shareable).put(sim.share(handle, flags)?, "shareableHandle"),
            SHARE_BY_FABRIC => {
                sim.require(Feature::FabricHandles)?;
                let mut bytes = [0; FABRIC_BYTES];
                bytes[..8].copy_from_slice(&FABRIC_TAG);
                bytes[8..16].copy_from_slice(&sim.share(handle, flags)?.to_le_bytes());
                Pointer::<u8>::at(shareable).put_list(&bytes, "shareableHandle")
            }
            other => refuse(Status::RT_PARAM_INVALID, format!("invalid kind of shareable handle {other}")),
        }
    }

    /// Imports shared physical memory for a device.
    run fn aclrtMemImportFromShareableHandle(sim, shareable: u64, device: i32, handle: Pointer<Handle>) {
        handle.check("handle")?;
        let device = sim.device(device)?;
        sim.current()?;
        let made = sim.import_shared(shareable, device)?;
        handle.put(Handle::new(made), "handle")
    }

    /// Imports shared physical memory for the current device.
    run fn aclrtMemImportFromShareableHandleV2(
        sim,
        shareable: Handle,
        kind: i32,
        flags: u64,
        handle: Pointer<Handle>,
    ) {
        handle.check("handle")?;
        if flags != 0 {
            return refuse(Status::RT_PARAM_INVALID, "flags must be 0");
        }
        let device = sim.current()?.device;
        let number = sim.number_in(shareable, kind)?;
        let made = sim.import_shared(number, device)?;
        handle.put(Handle::new(made), "handle")
    }

    /// Permits processes to import shared memory.
    run fn aclrtMemSetPidToShareableHandle(sim, shareable: u64, pids: Pointer<i32>, count: usize) {
        let pids = pids.list(count, "pid")?;
        sim.list_for_shared(shareable, &pids)
    }

    /// Permits processes to import shared memory, by a handle of either type.
    run fn aclrtMemSetPidToShareableHandleV2(
        sim,
        shareable: Handle,
        kind: i32,
        pids: Pointer<i32>,
        count: usize,
    ) {
        let number = sim.number_in(shareable, kind)?;
        let pids = pids.list(count, "pid")?;
        sim.list_for_shared(number, &pids)
    }

    /// Returns an additional handle of the memory that is mapped at an address.
    run fn aclrtMemRetainAllocationHandle(sim, pointer: Handle, handle: Pointer<Handle>) {
        let address = pointer.required("virPtr")?;
        handle.check("handle")?;
        let block = sim.device_operand(address, 1)?;
        if block.origin != Origin::Mapped {
            return refuse(Status::RT_PARAM_INVALID, "no physical memory is mapped at the address");
        }
        let retained = sim.machine.retain_block_at(Address::new(address))?;
        let info = sim.machine.block_info(retained)?;
        let location = MemLocation { id: block.device as u32, kind: MemLocation::DEVICE };
        let made = PhysicalMemory {
            block: retained,
            size: info.size,
            page: block.page,
            device: block.device,
            home: block.home,
            properties: PhysicalMemProp { location, ..PhysicalMemProp::default() },
            imported_by: block.imported_by,
            shared: None,
        };
        let mut state = sim.state();
        let value = state.new_handle();
        state.physical.insert(value, made);
        handle.put(Handle::new(value), "handle")
    }

    /// Returns the properties with which physical memory was created.
    run fn aclrtMemGetAllocationPropertiesFromHandle(sim, handle: Handle, properties: Pointer<PhysicalMemProp>) {
        let found = sim.with_physical(handle, |found| Ok(found.properties))?;
        properties.put(found, "prop")
    }
}
