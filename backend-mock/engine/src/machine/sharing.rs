//! Sharing of allocations between processes: export, open, close.
//!
//! There are two kinds of handles, as with the vendors. Bytes can be copied, kept after a free, and opened by any
//! process that reads them; a file descriptor cannot, and it pins the memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::state::Machine;
use crate::memory::{
    AddressSource, Import, ImportKey, Lease, MappedObject, Mapping, Reservation, revoke_exports,
    wait_for_importers,
};
use crate::model::{Access, Address, EngineError, Lifetime, Operation, Revocation};
use crate::shared::{
    ExportEpoch, HANDLE_BYTES, Handle, HandleKind, Object, ObjectKind, SEPARATE_EXPORTS, refuse_own,
};
use crate::system::{duplicate, lock, whole_pages, with_more_descriptors};

/// A received handle: the bytes, and the descriptor if the handle has one.
#[derive(Debug)]
pub struct Part<'a> {
    /// The bytes of [`Machine::export_bytes`] or [`Machine::export_fd`].
    pub handle: &'a [u8],
    /// The descriptor of [`Machine::export_fd`], received over any transport.
    pub fd: Option<OwnedFd>,
}

/// An object that another process exported.
pub(super) struct ImportedObject {
    pub(super) object: Object,
    /// Number of the memory file's descriptor in the exporter.
    slot: u32,
    /// The pidfd of an exporter that can revoke the memory, and the epoch of the export.
    pub(super) exporter: Option<(OwnedFd, ExportEpoch)>,
}

impl Machine {
    /// Exports an allocation as bytes, which another process of the same user can open while the allocation exists.
    ///
    /// Repeated calls return the same bytes until the allocation is freed or [`unexport`](Self::unexport)ed.
    ///
    /// # Errors
    /// `UnknownAddress`; `NotBase` for an interior address; `Imported`.
    pub fn export_bytes(&self, address: Address) -> Result<[u8; HANDLE_BYTES], EngineError> {
        self.enter(Operation::Export)?;
        let memory = lock(&self.memory);
        let (mapping, owned) = memory.own(address)?;
        Ok(handle_of(mapping, &owned.file, HandleKind::Bytes, 0).encode())
    }

    /// Exports an allocation as bytes that are revoked separately, by the returned number.
    ///
    /// The handle differs from all others and opens at a separate address. One allocation has at most 256 separate
    /// exports at a time.
    ///
    /// # Errors
    /// As [`export_bytes`](Self::export_bytes); `InvalidValue` for too many exports.
    pub fn export_separately(&self, address: Address) -> Result<([u8; HANDLE_BYTES], u32), EngineError> {
        self.enter(Operation::Export)?;
        let mut memory = lock(&self.memory);
        memory.own(address)?;
        let owned = memory.owned.get_mut(&address.get()).ok_or(EngineError::UnknownAddress { address })?;
        let free = (1..=SEPARATE_EXPORTS as u32).find(|number| !owned.separate.contains(number));
        let number = free
            .ok_or_else(|| EngineError::invalid_value("more than 256 separate exports of one allocation"))?;
        owned.separate.insert(number);
        let (mapping, owned) = memory.own(address)?;
        Ok((handle_of(mapping, &owned.file, HandleKind::Bytes, number).encode(), number))
    }

    /// Revokes an export of [`export_separately`](Self::export_separately), as [`unexport`](Self::unexport) revokes
    /// all.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`, `Imported`; `InvalidValue` for a number that is not in use.
    pub fn unexport_separate(&self, address: Address, number: u32) -> Result<(), EngineError> {
        self.enter(Operation::Unexport)?;
        let mut memory = lock(&self.memory);
        memory.own(address)?;
        let owned = memory.owned.get_mut(&address.get()).ok_or(EngineError::UnknownAddress { address })?;
        if !owned.separate.remove(&number) {
            return Err(EngineError::invalid_value("a number that no export has"));
        }
        let (mapping, owned) = memory.own(address)?;
        if mapping.identity.lifetime == Lifetime::Revoking {
            mapping.page.revoke_separate(number);
            wait_for_importers(&owned.file);
        }
        Ok(())
    }

    /// Exports an allocation as a file descriptor, to be passed by SCM_RIGHTS, and bytes.
    ///
    /// The descriptor pins the memory, with either lifetime, and can be opened after the exporter's termination.
    ///
    /// # Errors
    /// As [`export_bytes`](Self::export_bytes), and `System`.
    pub fn export_fd(&self, address: Address) -> Result<(OwnedFd, [u8; HANDLE_BYTES]), EngineError> {
        self.enter(Operation::Export)?;
        let memory = lock(&self.memory);
        let (mapping, owned) = memory.own(address)?;
        let handle = handle_of(mapping, &owned.file, HandleKind::Descriptor, 0).encode();
        Ok((duplicate(&owned.file)?, handle))
    }

    /// Revokes all bytes exported so far and keeps the memory.
    ///
    /// With [`Lifetime::Revoking`] importers lose their mappings, and their running work on them is complete when this
    /// returns. With [`Lifetime::Pinning`] the call has no effect, as with CUDA.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`, `Imported`.
    pub fn unexport(&self, address: Address) -> Result<(), EngineError> {
        self.enter(Operation::Unexport)?;
        let memory = lock(&self.memory);
        let (mapping, owned) = memory.own(address)?;
        if mapping.identity.lifetime == Lifetime::Revoking {
            revoke_exports(&mapping.page, &owned.file);
        }
        Ok(())
    }

    /// Opens an allocation of another process in the address space of a device.
    ///
    /// A second open of the same allocation with the same device and access returns the same address, and is closed
    /// separately.
    ///
    /// # Errors
    /// `InvalidDevice`; `InvalidHandle` for an invalid or stale handle; `OwnProcess`; `ExporterGone`;
    /// `PermissionDenied`; `NoPeerAccess`; `System`.
    pub fn open(
        &self,
        handle: &[u8],
        fd: Option<OwnedFd>,
        device: usize,
        access: Access,
    ) -> Result<Address, EngineError> {
        self.open_contiguous(vec![Part { handle, fd }], device, access)
    }

    /// Opens several allocations of other processes in one contiguous range, in the given order.
    ///
    /// All sizes but the last must be whole pages. The returned address closes all parts. Each call with several parts
    /// creates new mappings.
    ///
    /// # Errors
    /// As [`open`](Self::open); `InvalidValue` for no parts, and for a part behind which a gap would remain.
    pub fn open_contiguous(
        &self,
        parts: Vec<Part<'_>>,
        device: usize,
        access: Access,
    ) -> Result<Address, EngineError> {
        self.enter(Operation::Open)?;
        self.device(device)?;
        let imported = parts.into_iter().map(|part| self.import_for(part, device, access));
        let imported = imported.collect::<Result<Vec<_>, _>>()?;
        let key = match &imported[..] {
            [only] => Some(ImportKey {
                owner: only.object.identity.owner,
                generation: only.object.identity.id,
                slot: only.slot,
                device,
                access,
                epoch: only.exporter.as_ref().map(|(_, epoch)| *epoch),
            }),
            _ => None,
        };
        let mut memory = lock(&self.memory);
        let imports = &mut memory.imports;
        if let Some(base) = key.and_then(|key| imports.by_key.get(&key).copied())
            && let Some(import) = imports.open.get_mut(&base)
        {
            import.opens += 1;
            return Ok(Address::new(base));
        }
        let mappings = map_contiguous(imported, device, access)?;
        let bases: Vec<u64> = mappings.iter().map(Mapping::base).collect();
        let base = bases[0];
        if let Some(key) = key {
            memory.imports.by_key.insert(key, base);
        }
        memory.imports.open.insert(base, Import { opens: 1, bases, device, key });
        for mapping in mappings {
            memory.ranges.insert(Arc::new(mapping));
        }
        Ok(Address::new(base))
    }

    /// Closes one open. The last close waits for all work of this process's streams on the device, as
    /// [`free`](Self::free) does, and unmaps the memory.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`, `NotImported`; `NotPermitted` from a host function.
    pub fn close(&self, address: Address) -> Result<(), EngineError> {
        self.enter_waiting(Operation::Close)?;
        let device = {
            let mut memory = lock(&self.memory);
            if !memory.ranges.at_base(address)?.imported {
                return Err(EngineError::NotImported { address });
            }
            let (opens, device) = memory.imports.get(address).map(|import| (import.opens, import.device))?;
            if opens > 1 {
                memory.imports.open.entry(address.get()).and_modify(|import| import.opens -= 1);
                return Ok(());
            }
            device
        };
        self.wait_for_device(device);
        self.release_import(address)
    }

    /// Closes one open without waiting for streams: after the last close, queued work that uses the memory fails.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`, `NotImported`.
    pub fn close_without_waiting(&self, address: Address) -> Result<(), EngineError> {
        self.enter(Operation::Close)?;
        {
            let memory = lock(&self.memory);
            if !memory.ranges.at_base(address)?.imported {
                return Err(EngineError::NotImported { address });
            }
            memory.imports.get(address)?;
        }
        self.release_import(address)
    }

    fn release_import(&self, address: Address) -> Result<(), EngineError> {
        let mut memory = lock(&self.memory);
        // Another thread may have opened it again, or closed it.
        let imports = &mut memory.imports;
        let Some(import) = imports.open.get_mut(&address.get()) else {
            return Err(EngineError::UnknownAddress { address });
        };
        import.opens -= 1;
        if import.opens > 0 {
            return Ok(());
        }
        let bases = std::mem::take(&mut import.bases);
        if let Some(key) = import.key {
            imports.by_key.remove(&key);
        }
        imports.open.remove(&address.get());
        for base in bases {
            if let Some(mapping) = memory.ranges.remove(base) {
                mapping.mark_closed();
            }
        }
        Ok(())
    }

    /// Opens the object that a handle names, for a device that must have access to its home.
    pub(super) fn import_for(
        &self,
        part: Part<'_>,
        device: usize,
        access: Access,
    ) -> Result<ImportedObject, EngineError> {
        let physical = self.device(device)?.physical;
        let imported = self.import(part, access)?;
        let home = imported.object.identity.physical as usize;
        if !self.config.peers.allows(physical, home) {
            return Err(EngineError::NoPeerAccess { from: physical, to: home });
        }
        Ok(imported)
    }

    /// Opens the object that a handle names, after checking that it may be opened.
    fn import(&self, part: Part<'_>, access: Access) -> Result<ImportedObject, EngineError> {
        let invalid = |reason| EngineError::InvalidHandle { reason };
        let handle = Handle::decode(part.handle)?;
        if !self.config.own_handles {
            refuse_own(handle.exporter, self.process)?;
        }
        match (handle.kind, part.fd) {
            (HandleKind::Bytes, None) => self.import_by_bytes(&handle, access),
            (HandleKind::Descriptor, Some(fd)) => {
                let object = Object::adopt(fd, ObjectKind::Memory, false)?;
                let identity = &object.identity;
                if (identity.owner, identity.id, identity.size) != (handle.exporter, handle.id, handle.size) {
                    return Err(invalid("the bytes and the file descriptor name different memory"));
                }
                Ok(ImportedObject { object, slot: handle.fd, exporter: None })
            }
            (HandleKind::Bytes, Some(_)) => Err(invalid("a handle of bytes has no file descriptor")),
            (HandleKind::Descriptor, None) => Err(invalid("the file descriptor of the handle is missing")),
            (HandleKind::Event, _) => Err(invalid("the handle names an event, not memory")),
        }
    }

    fn import_by_bytes(&self, handle: &Handle, access: Access) -> Result<ImportedObject, EngineError> {
        let invalid = |reason| EngineError::InvalidHandle { reason };
        let pid = handle.exporter.pid;
        let gone = EngineError::ExporterGone { pid };
        // Opened before the process is checked, so that it is not the pidfd of a later process with this pid.
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| gone.clone())?;
        let watch = || pidfd_open(raw, PidfdFlags::empty());
        let exporter = with_more_descriptors(watch).map_err(|errno| match errno {
            Errno::SRCH | Errno::INVAL => gone,
            errno => EngineError::System { call: "pidfd_open", errno: errno.raw_os_error() },
        })?;
        let object = Object::open(handle, ObjectKind::Memory, access == Access::ReadWrite)?;
        let revoking = object.identity.lifetime == Lifetime::Revoking;
        if object.identity.id != handle.id && (revoking || self.config.check_generation) {
            return Err(invalid(
                "the handle is stale: the exporter has freed the memory and allocated other memory in its place",
            ));
        }
        match object.page.revocation(handle.epoch) {
            None => {}
            Some(Revocation::Unexported) => return Err(invalid("the exporter has revoked it")),
            Some(_) => return Err(invalid("the exporter has freed the memory")),
        }
        Ok(ImportedObject { object, slot: handle.fd, exporter: revoking.then_some((exporter, handle.epoch)) })
    }
}

fn handle_of(mapping: &Mapping, file: &OwnedFd, kind: HandleKind, separate: u32) -> Handle {
    Handle {
        kind,
        exporter: mapping.identity.owner,
        fd: Object::slot(file),
        id: mapping.identity.id,
        epoch: mapping.page.epoch(separate),
        size: mapping.size(),
    }
}

fn map_contiguous(
    parts: Vec<ImportedObject>,
    device: usize,
    access: Access,
) -> Result<Vec<Mapping>, EngineError> {
    let mut lengths = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let size = part.object.identity.size;
        let rounded = whole_pages(size).and_then(|rounded| usize::try_from(rounded).ok());
        let rounded = rounded.ok_or_else(|| EngineError::invalid_value("a part that is too large"))?;
        if rounded as u64 != size && index + 1 < parts.len() {
            let what =
                format!("part {index} of {size} bytes: a part that another one follows must be whole pages");
            return Err(EngineError::invalid_value(what));
        }
        lengths.push(rounded);
    }
    let total = lengths.iter().try_fold(0_usize, |sum, &length| sum.checked_add(length));
    let total = total.filter(|&total| total > 0).ok_or_else(|| EngineError::invalid_value("no parts"))?;
    let space = Arc::new(Reservation::new(total)?);
    let mut offset = 0;
    let mut mappings = Vec::with_capacity(parts.len());
    for (part, length) in parts.into_iter().zip(lengths) {
        let Object { file, page, identity } = part.object;
        let writable = access == Access::ReadWrite;
        let content = MappedObject { file: &file, page, identity, device, writable, imported: true };
        let mapping = Mapping::new(AddressSource::Reservation(space.clone()), offset, length, content)?;
        let lease = part.exporter.map(|(exporter, epoch)| Lease::new(file, exporter, epoch));
        mappings.push(mapping.with_lease(lease));
        offset += length;
    }
    Ok(mappings)
}
