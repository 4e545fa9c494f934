//! Imports of memory that are mapped in reserved ranges.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{DeviceReservations, Imported, ReceivedHandle, ReservationGranularity};
use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};
use device_ipc_mock_engine::{Address, BlockId, EngineError, Machine, Part};

use crate::errors::{engine, unsupported};
use crate::profile::Kinds;
use crate::received::{engine_access, open_error};

/// Reserved ranges of the engine, and imports for them.
#[derive(Debug)]
pub(crate) struct MockReservations {
    machine: Arc<Machine>,
    kinds: Arc<Kinds>,
    imports: Mutex<Imports>,
}

#[derive(Debug, Default)]
struct Imports {
    last_cookie: u64,
    by_cookie: HashMap<u64, Import>,
}

/// An import: its blocks in the order of their addresses.
#[derive(Debug)]
struct Import {
    blocks: Vec<Placed>,
    access: Access,
    /// The address at which it is mapped.
    mapped: Option<u64>,
}

/// A block, and its place from the start of the range.
#[derive(Clone, Copy, Debug)]
struct Placed {
    block: BlockId,
    offset: u64,
    size: u64,
}

/// Rounds up to the pages of the processor, which the engine maps as a whole.
fn whole_pages(bytes: u64) -> Result<u64> {
    bytes
        .checked_next_multiple_of(rustix::param::page_size() as u64)
        .ok_or_else(|| Error::InvalidRegion(format!("{bytes} bytes exceed the address space")))
}

impl MockReservations {
    pub(crate) fn new(machine: Arc<Machine>, kinds: Arc<Kinds>) -> Self {
        Self { machine, kinds, imports: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Imports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Imports each part behind the ones before it. Returns the length of all.
    fn import_parts(
        &self,
        parts: Vec<Part<'_>>,
        (on, access): (DeviceOrdinal, Access),
        blocks: &mut Vec<Placed>,
    ) -> Result<u64, EngineError> {
        let mut offset = 0;
        for part in parts {
            let block = self.machine.import_memory(part, on.index(), engine_access(access))?;
            let size = self.machine.block_info(block)?.size;
            blocks.push(Placed { block, offset, size });
            offset += size;
        }
        Ok(offset)
    }

    fn release_blocks(&self, blocks: &[Placed]) -> Result<()> {
        let mut result = Ok(());
        for placed in blocks {
            let released = self.machine.release_block(placed.block).map_err(engine("release_block"));
            // Every block, also after an error.
            result = result.and(released);
        }
        result
    }

    fn unmap_blocks(&self, blocks: &[Placed], at: u64) -> Result<()> {
        blocks.iter().try_for_each(|placed| {
            let address = Address::new(at + placed.offset);
            self.machine.unmap_blocks(address, placed.size).map_err(engine("unmap_blocks"))
        })
    }
}

impl DeviceReservations for MockReservations {
    fn granularity(&self, _on: DeviceOrdinal) -> Result<ReservationGranularity> {
        let unit = self.kinds.unit_of_places();
        Ok(ReservationGranularity { place: unit, address: unit })
    }

    fn reserve(&self, on: DeviceOrdinal, bytes: u64, at: Option<DevicePtr>) -> Result<DeviceRange> {
        self.machine.peer_access(on.index(), on.index()).map_err(engine("reserve"))?;
        let whole = whole_pages(bytes)?;
        if let Some(at) = at {
            let reserved = self.machine.reserve_at(Address::new(at.get()), whole);
            if reserved.map_err(engine("reserve"))? {
                return Ok(DeviceRange::new(on, at, bytes));
            }
        }
        let base = self.machine.reserve(whole, self.kinds.unit_of_places()).map_err(engine("reserve"))?;
        Ok(DeviceRange::new(on, DevicePtr::new(base.get()), bytes))
    }

    fn unreserve(&self, reserved: DeviceRange) -> Result<()> {
        let whole = whole_pages(reserved.len)?;
        self.machine.unreserve(Address::new(reserved.ptr.get()), whole).map_err(engine("unreserve"))
    }

    fn import(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Imported> {
        self.machine.peer_access(on.index(), on.index()).map_err(engine("import_memory"))?;
        let mut handles = handles;
        for handle in &handles {
            if let Some(kind) = self.kinds.get(handle.kind).filter(|kind| !kind.info.remappable) {
                return Err(unsupported(
                    "map this memory in a reserved range",
                    format!("memory of its kind ({}) gets its address from the driver", kind.info.name),
                ));
            }
        }
        let elsewhere = self.kinds.other_home(&handles, on);
        let parts = self.kinds.parts(&mut handles, on, access)?;
        if parts.is_empty() {
            return Err(unsupported("import 0 handles", "a range has at least one allocation"));
        }
        let mut blocks = Vec::with_capacity(parts.len());
        let len = self
            .import_parts(parts, (on, access), &mut blocks)
            .map_err(|error| open_error("import_memory", error, on, elsewhere))
            .and_then(|len| check_gaps(&blocks).map(|()| len))
            .inspect_err(|_| drop(self.release_blocks(&blocks)))?;
        let mut imports = self.lock();
        imports.last_cookie += 1;
        let cookie = imports.last_cookie;
        imports.by_cookie.insert(cookie, Import { blocks, access, mapped: None });
        Ok(Imported { device: on, len, cookie })
    }

    fn map(&self, imported: &Imported, at: DevicePtr) -> Result<()> {
        let mut imports = self.lock();
        let import = imports.by_cookie.get_mut(&imported.cookie).ok_or_else(unknown)?;
        if import.mapped.is_some() {
            return Err(Error::InvalidRegion("the import is mapped already".into()));
        }
        let device = imported.device.index();
        for (index, placed) in import.blocks.iter().enumerate() {
            let address = Address::new(at.get() + placed.offset);
            let mapped = self.machine.map_block(address, placed.size, 0, placed.block);
            if let Err(error) = mapped {
                let _ = self.unmap_blocks(&import.blocks[..index], at.get());
                return Err(engine("map_block")(error));
            }
            let granted =
                self.machine.set_access(address, placed.size, device, Some(engine_access(import.access)));
            if let Err(error) = granted {
                let _ = self.unmap_blocks(&import.blocks[..=index], at.get());
                return Err(engine("set_access")(error));
            }
        }
        import.mapped = Some(at.get());
        Ok(())
    }

    fn unmap(&self, imported: &Imported) -> Result<()> {
        let mut imports = self.lock();
        let import = imports.by_cookie.get_mut(&imported.cookie).ok_or_else(unknown)?;
        let at = import.mapped.ok_or_else(|| Error::InvalidRegion("the import is not mapped".into()))?;
        self.unmap_blocks(&import.blocks, at)?;
        import.mapped = None;
        Ok(())
    }

    fn release(&self, imported: Imported) -> Result<()> {
        let import = self.lock().by_cookie.remove(&imported.cookie).ok_or_else(unknown)?;
        let unmapped = import.mapped.map_or(Ok(()), |at| self.unmap_blocks(&import.blocks, at));
        self.release_blocks(&import.blocks).and(unmapped)
    }
}

/// Refuses a part that is not whole pages and that another one follows.
fn check_gaps(blocks: &[Placed]) -> Result<()> {
    for part in &blocks[..blocks.len() - 1] {
        if whole_pages(part.size)? != part.size {
            return Err(Error::Protocol(format!(
                "a part of {} bytes that another one follows is not whole pages",
                part.size
            )));
        }
    }
    Ok(())
}

fn unknown() -> Error {
    Error::InvalidRegion(
        "no import that this backend made has this number; it may already be released".into(),
    )
}
