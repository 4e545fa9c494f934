//! Memory and events of other processes by handles of 64 bytes (`cuIpc*`, in "Memory Management" of `cuda.h`).

use std::ffi::c_uint;

use device_ipc_mock_engine::{Address, BlockId, EngineError, EventId, Machine};

use crate::context::{Context, context, current};
use crate::directory::{Directory, Entry, Exporter};
use crate::entry::driver;
use crate::event::{Event, add, event};
use crate::ffi::{IpcHandle, Out};
use crate::handle::{Handle, HandleKind, Place, shared_memory};
use crate::memory::{Block, Chunk, Kind, MemoryTable, PAGE, give_all_devices_access};
use crate::portal::{Request, ask};
use crate::simulator::{Objects, lock, simulator};
use crate::status::{Result, Status};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: required by every open.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// Memory that was opened.
#[derive(Debug)]
pub(crate) struct OpenedMemory {
    /// The slot in the handle.
    place: Place,
    /// Opens of this context that were not closed yet.
    opens: u32,
    block: BlockId,
    /// Address and size of the whole mapping.
    pub(crate) range: (u64, u64),
}

impl OpenedMemory {
    /// Unmaps the memory.
    pub(crate) fn close(self, machine: &Machine) {
        let (base, size) = self.range;
        let _ = machine.unmap_blocks(Address::new(base), size);
        let _ = machine.unreserve(Address::new(base), size);
        let _ = machine.release_block(self.block);
    }
}

/// Returns the directory of this process, and creates it for the first export.
fn directory(objects: &mut Objects) -> Result<&mut Directory> {
    match &mut objects.directory {
        Some(directory) => Ok(directory),
        none => Ok(none.insert(Directory::new()?)),
    }
}

/// Re-opens a handle that is open in this process: the same address in the same context, an error in another
/// context of the device, and `None` on another device.
fn open_again(memory: &mut MemoryTable, context: &Context, place: &Place) -> Result<Option<u64>> {
    for block in memory.blocks.values_mut().filter(|block| block.device == context.device) {
        if let Kind::Opened(opened) = &mut block.kind
            && opened.place == *place
        {
            if block.context != context.handle {
                return Err(Status::INVALID_HANDLE);
            }
            opened.opens += 1;
            return Ok(Some(block.base));
        }
    }
    Ok(None)
}

/// Returns the event in the slot that a handle names, destroyed or not; `None` if there is none, or its exporter
/// has exited.
fn open_event(machine: &Machine, handle: &Handle, device: usize) -> Result<Option<EventId>> {
    let exporter = match Exporter::reach(&handle.place) {
        Ok(exporter) => exporter,
        // For an exporter that is not in this `/proc`, exited and unreachable are not distinguished.
        Err(_) if handle.is_in_other_pid_namespace() => return Err(Status::MAP_FAILED),
        Err(_) => return Ok(None),
    };
    let Ok(Entry::Event { engine }) = exporter.entry(&handle.place) else { return Ok(None) };
    let opened = if exporter.over_socket {
        let fd =
            ask(handle.place.nonce, Request::event(handle.place.slot)).map_err(|_| Status::MAP_FAILED)?;
        machine.open_event_fd(fd, device)
    } else {
        machine.open_event(&engine, device)
    };
    match opened {
        Ok(event) => Ok(Some(event)),
        // Since the table was read, another event took the slot, or the exporter was killed.
        Err(EngineError::InvalidHandle { .. } | EngineError::ExporterGone { .. }) => Ok(None),
        Err(_) => Err(Status::MAP_FAILED),
    }
}

/// Imports the physical memory that an entry names.
fn import(machine: &Machine, exporter: &Exporter, place: &Place, number: u64) -> Result<BlockId> {
    // Freed since the table was read: the number of the block is stale.
    if exporter.over_socket {
        let fd = ask(place.nonce, Request::block(number)).map_err(|_| Status::INVALID_VALUE)?;
        return machine.import_block_fd(fd).map_err(Status::from);
    }
    machine.import_block_number(number).map_err(Status::from)
}

driver! {
    /// Returns the handle of the allocation that contains an address, always the same bytes.
    fn cuIpcGetMemHandle(out: Out<IpcHandle>, address: u64) {
        current()?;
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let block = objects.memory.find(address).ok_or(Status::INVALID_VALUE)?;
        let Kind::Plain { chunk } = block.kind else { return Err(Status::INVALID_VALUE) };
        let (base, size, id, offset) = (block.base, block.size, block.id, block.base - chunk);
        let chunk: Option<&Chunk> = objects.memory.chunks.get(&chunk);
        let whole = chunk.ok_or(Status::UNKNOWN)?.block;
        let block = simulator.machine.export_block_number(whole)?;
        let entry = Entry::Memory { id, block, offset, size };
        let reserved = directory(&mut objects)?.export_memory(base, entry, id)?;
        out.put(IpcHandle { reserved })
    }

    /// Opens a handle in the current context. A context that has it open already gets the same address.
    fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: IpcHandle, flags: c_uint) {
        let context = current()?;
        // Other bits are ignored.
        if flags & LAZY_ENABLE_PEER_ACCESS == 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let simulator = simulator()?;
        let named = Place::decode(&handle.reserved).ok_or(Status::INVALID_VALUE)?;
        if let Some(base) = open_again(&mut simulator.objects().memory, &context, &named)? {
            return out.put(base);
        }
        let exporter = Exporter::reach(&named)?;
        let (number, offset, size) = match exporter.entry(&named)? {
            // Imports the block that is in the slot now, not the one that the handle was made for.
            Entry::Memory { block, offset, size, .. } => (block, offset, size),
            Entry::Private => return Err(Status::NOT_PERMITTED),
            Entry::Empty | Entry::Event { .. } => return Err(Status::INVALID_VALUE),
        };
        let machine = &simulator.machine;
        let block = import(machine, &exporter, &named, number)?;
        let info = machine.block_info(block)?;
        let whole = info.size;
        let mapped = (|| {
            let home = info.device.ok_or(Status::INVALID_DEVICE)?;
            if home != context.device && !machine.peer_access(context.device, home)? {
                return Err(Status::PEER_ACCESS_UNSUPPORTED);
            }
            if offset.checked_add(size).is_none_or(|end| end > whole) {
                return Err(Status::INVALID_VALUE);
            }
            let base = machine.reserve(whole, PAGE)?;
            machine.map_block(base, whole, 0, block)?;
            give_all_devices_access(machine, base.get(), whole)?;
            Ok(base.get())
        })();
        let base = mapped.inspect_err(|_| {
            let _ = machine.release_block(block);
        })?;
        let mut objects = simulator.objects();
        let id = objects.memory.next_id();
        let opened = OpenedMemory { place: named, opens: 1, block, range: (base, whole) };
        objects.memory.insert(Block {
            base: base + offset,
            size,
            device: context.device,
            context: context.handle,
            id,
            kind: Kind::Opened(opened),
        });
        out.put(base + offset)
    }

    /// Closes one open, whatever context is current, also during captures.
    fn cuIpcCloseMemHandle(address: u64) {
        current()?;
        let simulator = simulator()?;
        let owner = {
            let objects = simulator.objects();
            let block = objects.memory.at_base(address)?;
            let is_last = matches!(&block.kind, Kind::Opened(opened) if opened.opens == 1);
            is_last.then_some(block.context)
        };
        if let Some(owner) = owner {
            // As the driver, which unmaps nothing while any stream has work.
            context(owner)?.synchronize_exclusively()?;
        }
        let mut objects = simulator.objects();
        let Objects { memory, pools, .. } = &mut *objects;
        let block = memory.blocks.get_mut(&address).ok_or(Status::INVALID_VALUE)?;
        match &mut block.kind {
            Kind::Opened(opened) if opened.opens > 1 => opened.opens -= 1,
            // Closed memory of another process needs no further steps.
            Kind::Opened(_) => drop(memory.remove(&simulator.machine, address, pools, None)),
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    /// Returns the handle of an event that was created with `CU_EVENT_INTERPROCESS`.
    fn cuIpcGetEventHandle(out: Out<IpcHandle>, handle: u64) {
        current()?;
        let event = event(handle).map_err(|status| match status {
            // An event of a reset context.
            Status::INVALID_CONTEXT => Status::INVALID_HANDLE,
            status => status,
        })?;
        if !event.interprocess || event.opened {
            return Err(Status::INVALID_HANDLE);
        }
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let mut slot = lock(&event.slot);
        let directory = directory(&mut objects)?;
        let (taken, reserved) = directory.export_event(simulator, *slot, event.engine, event.handle)?;
        *slot = Some(taken);
        out.put(IpcHandle { reserved })
    }

    /// Opens an event in the current context. It needs the exporter's `/dev/shm` but not the exporter: neither the
    /// destruction of the event nor the death of its creator is detected.
    fn cuIpcOpenEventHandle(out: Out<u64>, handle: IpcHandle) {
        let context = current()?;
        if out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let named = Handle::decode(&handle.reserved, HandleKind::Event).ok_or(Status::MAP_FAILED)?;
        if named.place.pid == std::process::id() {
            return Err(Status::INVALID_CONTEXT);
        }
        let here = shared_memory();
        if here == 0 || named.shared_memory != here {
            return Err(Status::MAP_FAILED);
        }
        let machine = &simulator()?.machine;
        let engine = match open_event(machine, &named, context.device)? {
            Some(event) => event,
            // As the driver, which reports no error: an event that is never recorded, so that no stream waits for
            // it.
            None => machine.create_event(context.device, true)?,
        };
        add(Event::new(context, engine, true, true), out)
    }
}
