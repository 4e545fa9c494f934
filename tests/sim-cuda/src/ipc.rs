//! Memory and events of another process by 64 bytes (`cuIpc*`, in "Memory Management" of `cuda.h`).

use std::ffi::c_uint;

use device_ipc_mock_engine::{Address, BlockId, Machine};

use crate::capture::refuse_where_unsafe;
use crate::context::current;
use crate::directory::{Directory, Entry, Exporter, Handle, HandleKind, shared_memory};
use crate::entry::driver;
use crate::event::{Event, add, event};
use crate::ffi::{IpcHandle, Out};
use crate::memory::{Block, Chunk, Kind, PAGE, open_to_all};
use crate::portal::{Question, ask};
use crate::simulator::{Objects, lock, simulator};
use crate::status::{Result, Status};

/// Memory that was opened.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The handle that it was opened with.
    handle: [u8; 64],
    /// How often this context has it open.
    opens: u32,
    block: BlockId,
    /// Address and size of the whole that is mapped.
    pub(crate) range: (u64, u64),
}

impl Opened {
    /// Takes the mapping away.
    pub(crate) fn close(self, machine: &Machine) {
        let (base, size) = self.range;
        let _ = machine.unmap_blocks(Address::new(base), size);
        let _ = machine.unreserve(Address::new(base), size);
        let _ = machine.release_block(self.block);
    }
}

/// The table of this process, which is made with the first export.
fn directory(objects: &mut Objects) -> Result<&mut Directory> {
    match &mut objects.directory {
        Some(directory) => Ok(directory),
        none => Ok(none.insert(Directory::new()?)),
    }
}

/// The physical memory that an entry names, imported.
fn import(machine: &Machine, exporter: &Exporter, handle: &Handle, number: u64) -> Result<BlockId> {
    // Freed since the table was read: then its number names nothing any more.
    if exporter.far {
        let fd = ask(handle.nonce, Question::block(number)).map_err(|_| Status::INVALID_VALUE)?;
        return machine.import_block_fd(fd).map_err(Status::from);
    }
    machine.import_block_number(number).map_err(Status::from)
}

driver! {
    /// The handle of the allocation in which an address lies: always the same bytes while it lives.
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

    /// Opens it in the current context. A context that has it open already gets the same address again.
    fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: IpcHandle, flags: c_uint) {
        let context = current()?;
        refuse_where_unsafe()?;
        // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        if flags & !1 != 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let simulator = simulator()?;
        let named = Handle::decode(&handle.reserved, HandleKind::Memory).ok_or(Status::INVALID_VALUE)?;
        {
            let mut objects = simulator.objects();
            let again = objects.memory.blocks.values_mut().find_map(|block| match &mut block.kind {
                Kind::Opened(opened)
                    if block.context == context.handle && opened.handle == handle.reserved =>
                {
                    opened.opens += 1;
                    Some(block.base)
                }
                _ => None,
            });
            if let Some(base) = again {
                return out.put(base);
            }
        }
        let exporter = Exporter::reach(&named)?;
        let (number, offset, size) = match exporter.entry(&named)? {
            // Not the number of the handle's block is asked for, but what is in its place.
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
            open_to_all(machine, base.get(), whole)?;
            Ok(base.get())
        })();
        let base = mapped.inspect_err(|_| {
            let _ = machine.release_block(block);
        })?;
        let mut objects = simulator.objects();
        let id = objects.memory.next_id();
        let opened = Opened { handle: handle.reserved, opens: 1, block, range: (base, whole) };
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

    /// Closes once what the current context has opened once.
    fn cuIpcCloseMemHandle(address: u64) {
        let context = current()?;
        refuse_where_unsafe()?;
        let simulator = simulator()?;
        let is_last = {
            let objects = simulator.objects();
            matches!(&objects.memory.at_base(address)?.kind, Kind::Opened(opened) if opened.opens == 1)
        };
        if is_last {
            // As the driver, which takes no mapping away while any stream has work, whatever that accesses.
            context.synchronize_alone()?;
        }
        let mut objects = simulator.objects();
        let Objects { memory, pools, .. } = &mut *objects;
        let block = memory.blocks.get_mut(&address).ok_or(Status::INVALID_VALUE)?;
        let own = block.context == context.handle;
        match &mut block.kind {
            Kind::Opened(opened) if own && opened.opens > 1 => opened.opens -= 1,
            // Nothing is left to do after memory of another process has been closed.
            Kind::Opened(_) if own => drop(memory.remove(&simulator.machine, address, pools, None)),
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    /// The handle of an event that was made with `CU_EVENT_INTERPROCESS`.
    fn cuIpcGetEventHandle(out: Out<IpcHandle>, handle: u64) {
        current()?;
        let event = event(handle).map_err(|status| match status {
            // An event whose context was reset.
            Status::INVALID_CONTEXT => Status::INVALID_HANDLE,
            status => status,
        })?;
        if !event.interprocess || event.opened {
            return Err(Status::INVALID_HANDLE);
        }
        let simulator = simulator()?;
        let engine = simulator.machine.export_event(event.engine)?;
        let mut objects = simulator.objects();
        let mut slot = lock(&event.slot);
        let (taken, reserved) = directory(&mut objects)?.export_event(*slot, engine, event.handle)?;
        *slot = Some(taken);
        out.put(IpcHandle { reserved })
    }

    /// Opens it in the current context. Needs the exporter's `/dev/shm`.
    fn cuIpcOpenEventHandle(out: Out<u64>, handle: IpcHandle) {
        let context = current()?;
        if out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let named = Handle::decode(&handle.reserved, HandleKind::Event).ok_or(Status::MAP_FAILED)?;
        if named.pid == std::process::id() {
            return Err(Status::INVALID_CONTEXT);
        }
        let here = shared_memory();
        if here == 0 || named.shared_memory != here {
            return Err(Status::MAP_FAILED);
        }
        let gone = |_| Status::MAP_FAILED;
        let exporter = Exporter::reach(&named).map_err(gone)?;
        let engine = match exporter.entry(&named).map_err(gone)? {
            Entry::Event { id, engine } if id == named.id => engine,
            _ => return Err(Status::MAP_FAILED),
        };
        let machine = &simulator()?.machine;
        let opened = if exporter.far {
            let fd = ask(named.nonce, Question::event(named.id)).map_err(gone)?;
            machine.open_event_fd(fd, context.device)
        } else {
            machine.open_event(&engine, context.device)
        };
        let engine = opened.map_err(|_| Status::MAP_FAILED)?;
        add(Event::new(context, engine, true, true), out)
    }
}
