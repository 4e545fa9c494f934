//! Memory pools ("Stream Ordered Memory Allocator" in `cuda.h`).
//!
//! A pool is one block of physical memory that is used where it is written. Its first page holds the number by which it is
//! known again. Nobody tells an importer that an allocation which it was given has gone: as on a GPU it reads what is there.

use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use device_ipc_mock_engine::{Access, Address, BlockId, Machine};

use crate::capture::node;
use crate::context::{current, device};
use crate::entry::driver;
use crate::ffi::{AccessDesc, In, Location, Out, PoolPointer, PoolProps};
use crate::gaps::Gaps;
use crate::memory::{Block, Kind, PAGE, device_of};
use crate::simulator::{Objects, Simulator, next_handle, simulator};
use crate::status::{Result, Status};
use crate::stream::{Target, target};
use crate::vmm::{FABRIC, PINNED, POSIX_FD, access, descriptor, flags_of, give};

/// Allocations of pools begin at multiples of this.
const UNIT: u64 = 512;
const POINTER_MAGIC: u64 = u64::from_le_bytes(*b"simpool\x01");

/// A pool, own or imported.
#[derive(Debug)]
pub(crate) struct Pool {
    device: usize,
    block: BlockId,
    base: u64,
    size: u64,
    nonce: u64,
    handle_types: c_int,
    is_default: bool,
    imported: bool,
    exported: bool,
    /// Destroyed by its owner; goes with the last allocation.
    destroyed: bool,
    gaps: Gaps,
    /// Allocations, or imported pointers.
    live: u64,
    used: u64,
    most_used: u64,
    release_threshold: u64,
    reuse: [c_int; 3],
}

/// The pools of a process.
#[derive(Debug, Default)]
pub(crate) struct PoolTable {
    pools: HashMap<u64, Pool>,
    /// Imported pools that were destroyed: to destroy one again is no error.
    closed: HashSet<u64>,
    /// Each device's own, made when first asked for, and the one that is current; 0: none yet.
    defaults: Vec<u64>,
    current: Vec<u64>,
}

impl PoolTable {
    pub(crate) fn new(devices: usize) -> Self {
        Self { defaults: vec![0; devices], current: vec![0; devices], ..Self::default() }
    }

    fn get(&self, handle: u64) -> Result<&Pool> {
        self.pools.get(&handle).filter(|pool| !pool.destroyed).ok_or(Status::INVALID_VALUE)
    }

    fn get_mut(&mut self, handle: u64) -> Result<&mut Pool> {
        self.pools.get_mut(&handle).filter(|pool| !pool.destroyed).ok_or(Status::INVALID_VALUE)
    }

    /// Bytes of a device that this process's own pools have handed out.
    pub(crate) fn used(&self, device: usize) -> u64 {
        let own = self.pools.values().filter(|pool| pool.device == device && !pool.imported);
        own.map(|pool| pool.used).sum()
    }

    /// The handle types that a pool offers, and its device.
    pub(crate) fn handle_types(&self, handle: u64) -> c_int {
        self.pools.get(&handle).map_or(0, |pool| pool.handle_types)
    }

    fn default_of(&mut self, machine: &Machine, device: usize) -> Result<u64> {
        if self.defaults[device] == 0 {
            let size = whole(machine.devices()[device].memory_bytes)?;
            let block = machine.create_sparse_block(device, size + PAGE)?;
            self.defaults[device] = self.add(machine, block, 0, true, false)?;
        }
        Ok(self.defaults[device])
    }

    fn current_of(&mut self, machine: &Machine, device: usize) -> Result<u64> {
        match self.current[device] {
            0 => self.default_of(machine, device),
            pool => Ok(pool),
        }
    }

    /// Maps a pool's memory.
    fn add(
        &mut self,
        machine: &Machine,
        block: BlockId,
        handle_types: c_int,
        is_default: bool,
        imported: bool,
    ) -> Result<u64> {
        let info = machine.block_info(block)?;
        let base = machine.reserve(info.size, PAGE)?;
        machine.map_block(base, info.size, 0, block)?;
        if let Some(home) = info.device {
            machine.set_access(base, info.size, home, Some(Access::ReadWrite))?;
        }
        // A pool of a device that this process does not see can be imported, and opened to one that it sees.
        let device = info.device.unwrap_or(0);
        let mut pool = Pool {
            device,
            block,
            base: base.get(),
            size: info.size,
            nonce: 0,
            handle_types,
            is_default,
            imported,
            exported: false,
            destroyed: false,
            gaps: Gaps::new(PAGE, info.size),
            live: 0,
            used: 0,
            most_used: 0,
            release_threshold: 0,
            reuse: [1; 3],
        };
        if imported {
            pool.nonce = pool.number().load(Ordering::Acquire);
            let is_it = |(_, known): &(&u64, &Pool)| known.imported && known.nonce == pool.nonce;
            let known = self.pools.iter().find(is_it).map(|(handle, _)| *handle);
            if let Some(known) = known {
                // A process has a pool once, however often it imports it.
                pool.unmap(machine);
                return Ok(known);
            }
        } else {
            pool.nonce = getrandom::u64().map_err(|_| Status::OPERATING_SYSTEM)?;
            pool.number().store(pool.nonce, Ordering::Release);
        }
        let handle = next_handle();
        self.pools.insert(handle, pool);
        Ok(handle)
    }

    /// Takes an allocation back.
    pub(crate) fn give_back(&mut self, machine: &Machine, handle: u64, offset: u64, size: u64) {
        let Some(pool) = self.pools.get_mut(&handle) else { return };
        pool.gaps.give_back(offset, size, UNIT);
        pool.used -= size.next_multiple_of(UNIT);
        self.let_go(machine, handle);
    }

    /// Forgets one allocation or imported pointer of a pool.
    pub(crate) fn let_go(&mut self, machine: &Machine, handle: u64) {
        if let Some(pool) = self.pools.get_mut(&handle) {
            pool.live -= 1;
        }
        self.settle(machine, handle);
    }

    /// Takes a destroyed pool away once nothing of it is left.
    fn settle(&mut self, machine: &Machine, handle: u64) {
        if self.pools.get(&handle).is_some_and(|pool| pool.destroyed && pool.live == 0)
            && let Some(pool) = self.pools.remove(&handle)
        {
            if pool.imported {
                self.closed.insert(handle);
            }
            pool.unmap(machine);
        }
    }
}

impl Pool {
    fn unmap(&self, machine: &Machine) {
        let _ = machine.unmap_blocks(Address::new(self.base), self.size);
        let _ = machine.unreserve(Address::new(self.base), self.size);
        let _ = machine.release_block(self.block);
    }

    /// The word by which processes know it again.
    fn number(&self) -> &AtomicU64 {
        // SAFETY: the first page of the pool is mapped as long as the pool is in the table, begins with this aligned word,
        // and is only accessed in this way, also by other processes.
        unsafe { AtomicU64::from_ptr(self.base as *mut u64) }
    }

    fn take(&mut self, size: u64) -> Result<u64> {
        let offset = self.gaps.take(size, UNIT).ok_or(Status::OUT_OF_MEMORY)?;
        self.live += 1;
        self.used += size.next_multiple_of(UNIT);
        self.most_used = self.most_used.max(self.used);
        Ok(offset)
    }
}

fn whole(bytes: u64) -> Result<u64> {
    bytes.checked_next_multiple_of(PAGE).ok_or(Status::INVALID_VALUE)
}

fn allocate(out: Out<u64>, size: usize, pool: Option<u64>, target: &Target) -> Result {
    if size == 0 || out.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    let simulator = simulator()?;
    let machine = &simulator.machine;
    let mut objects = simulator.objects();
    let Objects { memory, pools, .. } = &mut *objects;
    let handle = match pool {
        Some(handle) => handle,
        None => pools.current_of(machine, target.context.device)?,
    };
    let size = size as u64;
    let free = machine.memory_info(pools.get(handle)?.device)?.0;
    let used = pools.used(pools.get(handle)?.device);
    let pool = pools.get_mut(handle)?;
    if pool.imported {
        return Err(Status::INVALID_VALUE);
    }
    if used.checked_add(size).is_none_or(|wanted| wanted > free) {
        return Err(Status::OUT_OF_MEMORY);
    }
    let id = memory.next_id();
    let offset = pool.take(size)?;
    let base = pool.base + offset;
    if node(target)? {
        // The place is the graph's from now on; there is memory once it runs.
        return out.put(base);
    }
    let kind = Kind::Pooled { pool: handle, offset };
    memory.insert(Block { base, size, device: pool.device, context: target.context.handle, id, kind });
    out.put(base)
}

/// Frees when the stream gets there; from now on nothing new can be asked of the address.
fn free_on_stream(address: u64, target: &Target) -> Result {
    crate::capture::refuse_on(target)?;
    target.order()?;
    let simulator = simulator()?;
    let taken = {
        let mut objects = simulator.objects();
        let block = objects.memory.at_base(address)?;
        if !matches!(block.kind, Kind::Plain { .. } | Kind::Pooled { .. } | Kind::PoolImported { .. }) {
            return Err(Status::INVALID_VALUE);
        }
        objects.memory.blocks.remove(&address)
    };
    let block = taken.ok_or(Status::INVALID_VALUE)?;
    let free = move || {
        let mut objects = simulator.objects();
        let Objects { memory, pools, directory, .. } = &mut *objects;
        // Unless the context has gone meanwhile, with everything, and somebody else has the place.
        if let std::collections::btree_map::Entry::Vacant(place) = memory.blocks.entry(address) {
            place.insert(block);
            // Only memory of the host leaves anything to do, and this is none.
            drop(memory.remove(&simulator.machine, address, pools, directory.as_mut()));
        }
    };
    Ok(simulator.machine.host_fn(Box::new(free), target.engine)?)
}

fn pool_properties(props: &PoolProps) -> Result<(usize, u64)> {
    if props.kind != PINNED || props.handle_types & !(POSIX_FD | FABRIC) != 0 {
        return Err(Status::INVALID_VALUE);
    }
    Ok((device_of(props.location)?, props.max_size as u64))
}

fn attribute(simulator: &Simulator, pool: u64, attribute: c_int) -> Result<u64> {
    let objects = simulator.objects();
    let pool = objects.pools.get(pool)?;
    Ok(match attribute {
        1..=3 => pool.reuse[attribute as usize - 1] as u64,
        4 => pool.release_threshold,
        5 | 6 => pool.most_used.next_multiple_of(PAGE),
        7 => pool.used,
        8 => pool.most_used,
        _ => return Err(Status::INVALID_VALUE),
    })
}

driver! {
    /// The pool that a device has from the start. It cannot be exported.
    fn cuDeviceGetDefaultMemPool(out: Out<u64>, number: c_int) {
        let device = device(number)?;
        let simulator = simulator()?;
        out.put(simulator.objects().pools.default_of(&simulator.machine, device)?)
    }

    /// The pool that `cuMemAllocAsync` takes from.
    fn cuDeviceGetMemPool(out: Out<u64>, number: c_int) {
        let device = device(number)?;
        let simulator = simulator()?;
        out.put(simulator.objects().pools.current_of(&simulator.machine, device)?)
    }

    /// Sets it.
    fn cuDeviceSetMemPool(number: c_int, handle: u64) {
        let device = device(number)?;
        let mut objects = simulator()?.objects();
        let pool = objects.pools.get(handle)?;
        if pool.device != device || pool.imported {
            return Err(Status::INVALID_VALUE);
        }
        objects.pools.current[device] = handle;
        Ok(())
    }

    /// Makes a pool.
    fn cuMemPoolCreate(out: Out<u64>, props: In<PoolProps>) {
        let simulator = simulator()?;
        let machine = &simulator.machine;
        let props = props.get()?;
        let (device, most) = pool_properties(&props)?;
        if props.handle_types & FABRIC != 0 && !simulator.config.imex {
            return Err(Status::NOT_PERMITTED);
        }
        let most = if most == 0 { machine.devices()[device].memory_bytes } else { most };
        let block = machine.create_sparse_block(device, whole(most)? + PAGE)?;
        out.put(simulator.objects().pools.add(machine, block, props.handle_types, false, false)?)
    }

    /// Destroys a pool, which stays for what is allocated from it.
    fn cuMemPoolDestroy(handle: u64) {
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let pools = &mut objects.pools;
        if pools.closed.contains(&handle) {
            return Ok(());
        }
        let pool = pools.get_mut(handle)?;
        if pool.is_default || (pool.imported && pool.live > 0) {
            return Err(Status::INVALID_VALUE);
        }
        pool.destroyed = true;
        let device = pool.device;
        if pools.current[device] == handle {
            pools.current[device] = 0;
        }
        pools.settle(&simulator.machine, handle);
        Ok(())
    }

    /// Gives unused memory back; there is none that is kept.
    fn cuMemPoolTrimTo(handle: u64, _keep: usize) {
        simulator()?.objects().pools.get(handle).map(drop)
    }

    /// Sets an attribute.
    fn cuMemPoolSetAttribute(handle: u64, attribute: c_int, value: Out<u64>) {
        let mut objects = simulator()?.objects();
        let pool = objects.pools.get_mut(handle)?;
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1] = Out::from_address(value.address()).get()?,
            4 => pool.release_threshold = value.get()?,
            6 | 8 if value.get()? == 0 => pool.most_used = pool.used,
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    /// An attribute.
    fn cuMemPoolGetAttribute(handle: u64, number: c_int, value: Out<u64>) {
        let known = attribute(simulator()?, handle, number)?;
        match number {
            1..=3 => Out::<c_int>::from_address(value.address()).put(known as c_int),
            _ => value.put(known),
        }
    }

    /// Says what devices may do with all of a pool's memory.
    fn cuMemPoolSetAccess(handle: u64, descriptions: In<AccessDesc>, count: usize) {
        let simulator = simulator()?;
        let objects = simulator.objects();
        let pool = objects.pools.get(handle)?;
        for index in 0..count {
            let description = descriptions.at(index)?;
            let device = device_of(description.location)?;
            let access = access(description.flags)?;
            if access == Some(Access::ReadOnly) {
                return Err(Status::NOT_SUPPORTED);
            }
            if device == pool.device && access.is_none() {
                return Err(Status::INVALID_DEVICE);
            }
            simulator.machine.set_access(Address::new(pool.base), pool.size, device, access)?;
        }
        Ok(())
    }

    /// What a device may do.
    fn cuMemPoolGetAccess(out: Out<c_int>, handle: u64, location: In<Location>) {
        let device = device_of(location.get()?)?;
        let simulator = simulator()?;
        let base = simulator.objects().pools.get(handle)?.base;
        out.put(flags_of(simulator.machine.access_of(Address::new(base), device)?))
    }

    /// Exports a pool that was made for it: a file descriptor.
    fn cuMemPoolExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong) {
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let pool = objects.pools.get_mut(handle)?;
        if flags != 0 || kind != POSIX_FD || pool.handle_types & kind == 0 || pool.imported {
            return Err(Status::INVALID_VALUE);
        }
        give(out, simulator.machine.export_block_fd(pool.block)?)?;
        pool.exported = true;
        Ok(())
    }

    /// Imports one. Nothing can be allocated from it.
    fn cuMemPoolImportFromShareableHandle(
        out: Out<u64>,
        os_handle: *const c_void,
        kind: c_int,
        flags: c_ulonglong,
    ) {
        let simulator = simulator()?;
        let machine = &simulator.machine;
        if flags != 0 || kind != POSIX_FD || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let block = machine.import_block_fd(descriptor(os_handle)?).map_err(|_| Status::UNKNOWN)?;
        if !machine.block_info(block)?.sparse {
            // A descriptor of physical memory that is no pool.
            machine.release_block(block)?;
            return Err(Status::NOT_SUPPORTED);
        }
        out.put(simulator.objects().pools.add(machine, block, 0, false, true)?)
    }

    /// The bytes that name an allocation of a pool which has been exported before.
    fn cuMemPoolExportPointer(out: Out<PoolPointer>, address: u64) {
        current()?;
        let objects = simulator()?.objects();
        let block = objects.memory.at_base(address)?;
        let Kind::Pooled { pool, offset } = block.kind else { return Err(Status::INVALID_VALUE) };
        let pool = objects.pools.pools.get(&pool).ok_or(Status::INVALID_VALUE)?;
        if !pool.exported {
            return Err(Status::INVALID_VALUE);
        }
        let words = [POINTER_MAGIC, pool.nonce, offset, block.size];
        let mut reserved = [0; 64];
        for (at, word) in words.into_iter().enumerate() {
            reserved[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        out.put(PoolPointer { reserved })
    }

    /// The address of such an allocation in an imported pool, whether or not it still lives.
    fn cuMemPoolImportPointer(out: Out<u64>, handle: u64, data: In<PoolPointer>) {
        let context = current()?;
        let bytes = data.get()?.reserved;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at * 8 + index]));
        let [magic, nonce, offset, size] = [0, 1, 2, 3].map(word);
        let mut objects = simulator()?.objects();
        let Objects { memory, pools, .. } = &mut *objects;
        let pool = pools.get_mut(handle)?;
        let inside = offset >= PAGE && offset.checked_add(size).is_some_and(|end| end <= pool.size);
        let wrong = magic != POINTER_MAGIC || nonce != pool.nonce;
        if !pool.imported || wrong || !inside || size == 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let base = pool.base + offset;
        if memory.blocks.contains_key(&base) {
            // Open already: the same address, which one free gives back.
            return out.put(base);
        }
        pool.live += 1;
        let (device, kind) = (pool.device, Kind::PoolImported { pool: handle });
        let id = memory.next_id();
        memory.insert(Block { base, size, device, context: context.handle, id, kind });
        out.put(base)
    }

    /// Allocates from the device's current pool, in the order of a stream.
    fn cuMemAllocAsync(out: Out<u64>, size: usize, stream: u64) {
        allocate(out, size, None, &target(stream)?)
    }

    /// Allocates from a pool.
    fn cuMemAllocFromPoolAsync(out: Out<u64>, size: usize, pool: u64, stream: u64) {
        allocate(out, size, Some(pool), &target(stream)?)
    }

    /// Frees in the order of a stream: also memory of `cuMemAlloc`.
    fn cuMemFreeAsync(address: u64, stream: u64) {
        let target = target(stream)?;
        if address == 0 { Ok(()) } else { free_on_stream(address, &target) }
    }
}
