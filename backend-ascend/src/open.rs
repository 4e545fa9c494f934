//! Opening and closing memory of another process.
//!
//! By key: `aclrtIpcMemImportByKey` and `aclrtIpcMemClose` in "IPC Memory Sharing" of the ACL manual. By shareable handle:
//! `aclrtMemImportFromShareableHandle` in "Virtual Memory Management", mapped at an address of our own.

use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Error, Opened, ReceivedHandle, Result};

use crate::NAME;
use crate::allocations::range_at;
use crate::bindings::*;
use crate::chip::Chip;
use crate::driver::{Driver, VISIBLE_DEVICES, call};
use crate::extent::address;
use crate::imports::{self, Block, Import, Way};
use crate::kinds::{KEY, SHAREABLE};
use crate::peers::Reach;
use crate::status::{NEEDED, is_out_of_memory, is_unsupported};
use crate::wire::{Key, parse_shareable};

impl Driver {
    /// Opens a key, or one or more shareable handles as one range, for `on`.
    pub(crate) fn open(
        &self,
        handles: &[ReceivedHandle],
        on: DeviceOrdinal,
        access: Access,
    ) -> Result<Opened> {
        self.device(on)?;
        let Some(first) = handles.first() else {
            return Err(unsupported("open no handles", "a range has at least one"));
        };
        for handle in handles {
            self.check_handle(handle, first)?;
        }
        if !access.is_writable() {
            return Err(unsupported(
                "open memory read-only",
                "ACL maps keys and shareable handles read-write only; open it read-write, or receive a copy",
            ));
        }
        for home in handles.iter().filter_map(|handle| handle.home) {
            if self.reach_of(on, home)? == Reach::Nothing {
                return Err(self.no_peer_access(on, home));
            }
        }
        match (first.kind, handles) {
            (KEY, [handle]) => self.open_key(handle, on),
            (KEY, _) => Err(unsupported(
                &format!("open {} keys as one range", handles.len()),
                "a key is one whole allocation at an address that the driver chooses; open each by itself",
            )),
            _ => self.open_shareables(handles, on),
        }
    }

    fn check_handle(&self, handle: &ReceivedHandle, first: &ReceivedHandle) -> Result<()> {
        if !matches!(handle.kind, KEY | SHAREABLE) {
            return Err(unsupported(
                &format!("open a handle of kind {}", handle.kind.0),
                "this version knows kinds 1 (key) and 2 (shareable handle); update the receiver",
            ));
        }
        if handle.kind != first.kind {
            return Err(unsupported("open handles of several kinds as one range", "open each by itself"));
        }
        if !handle.fds.is_empty() {
            return Err(Error::Protocol(format!(
                "an Ascend handle came with {} file descriptors",
                handle.fds.len()
            )));
        }
        Ok(())
    }

    fn open_key(&self, handle: &ReceivedHandle, on: DeviceOrdinal) -> Result<Opened> {
        let (key, stated) = Key::parse(handle.bytes.as_slice(), handle.size)?;
        let _opening = imports::opening();
        if let Some(import) = imports::by_key(&mut imports::table(), &key) {
            if import.range.device != on {
                return Err(unsupported(
                    &format!(
                        "open a key on device {on} that this process has open on device {}",
                        import.range.device
                    ),
                    "the driver lets a process open a key once; ask the exporter for a further one",
                ));
            }
            import.opens += 1;
            return Ok(Opened { range: import.range, cookie: import.range.ptr.get() });
        }
        let _current = self.enter(on)?;
        let reach = handle.home.map(|home| self.reach_of(on, home)).transpose()?;
        // The flag enables both directions, and fails between dies of one chip, which have none.
        let flags = match reach {
            Some(Reach::Itself | Reach::Chip) => ACL_RT_IPC_MEM_IMPORT_FLAG_DEFAULT,
            _ => ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS,
        };
        let mut mapped = std::ptr::null_mut();
        // SAFETY: writes one address; the key ends with a NUL, and the driver checks its bytes, whatever they are.
        let status = unsafe { call!(self, aclrtIpcMemImportByKey(&raw mut mapped, key.as_ptr(), flags)) };
        if status != ACL_SUCCESS {
            return Err(self.import_refused("aclrtIpcMemImportByKey", status, handle, on));
        }
        match self.mapped_range(range_at(on, mapped, stated)) {
            Ok(range) => {
                tracing::debug!(device = %on, bytes = range.len, ?reach, "opened an IPC key");
                let import = Import { range, home: handle.home, opens: 1, by: Way::Key(key) };
                imports::table().insert(range.ptr, import);
                Ok(Opened { range, cookie: range.ptr.get() })
            }
            Err(error) => {
                // SAFETY: imported above, and known to nobody else.
                let status = unsafe { call!(self, aclrtIpcMemClose(key.as_ptr())) };
                tracing::debug!(status, "closed an IPC key whose range could not be told");
                Err(error)
            }
        }
    }

    /// What was mapped: as the driver tells it, which the peer's word does not change. Before CANN 9.0 it cannot tell,
    /// and what can be checked is that the last byte stated is device memory.
    fn mapped_range(&self, stated: DeviceRange) -> Result<DeviceRange> {
        if let Some(told) = self.address_range(stated)? {
            return if told.ptr == stated.ptr {
                Ok(told)
            } else {
                Err(Error::Protocol(format!(
                    "the key was mapped at {}, inside other memory at {}",
                    stated.ptr, told.ptr
                )))
            };
        }
        let last = stated.len.checked_sub(1).and_then(|last| stated.ptr.checked_add(last));
        let there = last.and_then(|last| self.attributes(last)).is_some_and(|attributes| {
            attributes.location.type_ == aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE
        });
        if there {
            return Ok(stated);
        }
        Err(Error::Protocol(format!(
            "the exporter states {} bytes, and there is no device memory at the end of them",
            stated.len
        )))
    }

    fn open_shareables(&self, handles: &[ReceivedHandle], on: DeviceOrdinal) -> Result<Opened> {
        let mut parts = Vec::with_capacity(handles.len());
        let mut total = 0u64;
        for handle in handles {
            let (number, size) = parse_shareable(handle.bytes.as_slice())?;
            total =
                total.checked_add(size).filter(|total| i64::try_from(*total).is_ok()).ok_or_else(|| {
                    Error::Protocol("the shareable handles state more bytes than there are addresses".into())
                })?;
            parts.push((number, size));
        }
        let _opening = imports::opening();
        for handle in handles {
            match handle.home {
                Some(home) => self.enable_peers(on, home)?,
                None => {
                    return Err(unsupported(
                        "open a shareable handle whose home this process does not see",
                        &format!(
                            "access between the cards has to be enabled, which takes both: add the home to \
                             {VISIBLE_DEVICES}"
                        ),
                    ));
                }
            }
        }
        if let Some(opened) = self.open_once_more(&parts, on)? {
            return Ok(opened);
        }
        let _current = self.enter(on)?;
        let mut base = std::ptr::null_mut();
        // SAFETY: writes one address; alignment, wish and flags are reserved.
        let status = unsafe {
            call!(self, aclrtReserveMemAddress(&raw mut base, total as usize, 0, std::ptr::null_mut(), 0))
        };
        self.check("aclrtReserveMemAddress", status)?;
        let range = range_at(on, base, total);
        let mut mapping = Mapping { driver: self, base: range.ptr, blocks: Vec::new() };
        let mut at = range.ptr;
        for (handle, (number, size)) in handles.iter().zip(parts) {
            mapping.add(handle, number, size, at, on)?;
            at = at.checked_add(size).unwrap_or(DevicePtr::NULL);
        }
        tracing::debug!(device = %on, bytes = range.len, "opened shareable handles");
        let home = handles.first().and_then(|handle| handle.home);
        let import = Import { range, home, opens: 1, by: Way::Shareable(mapping.keep()) };
        imports::table().insert(range.ptr, import);
        Ok(Opened { range, cookie: range.ptr.get() })
    }

    /// The mapping that this device has of the same shareable handles: the driver lets a process import a handle once for
    /// each device. (One-to-one, as the manual has it, is what the handles of one device are.)
    fn open_once_more(&self, parts: &[(u64, u64)], on: DeviceOrdinal) -> Result<Option<Opened>> {
        let numbers: Vec<u64> = parts.iter().map(|(number, _)| *number).collect();
        let mut table = imports::table();
        let Some(import) = imports::by_numbers(&mut table, &numbers, on) else { return Ok(None) };
        let Way::Shareable(blocks) = &import.by else { return Ok(None) };
        if !blocks.iter().map(|block| (block.number, block.size)).eq(parts.iter().copied()) {
            return Err(unsupported(
                "open shareable handles of which this process has some open on the device in another order or number",
                "the driver imports each once for a device; open the same region, or drop the other mapping",
            ));
        }
        import.opens += 1;
        Ok(Some(Opened { range: import.range, cookie: import.range.ptr.get() }))
    }

    /// Closes what [`open`](Self::open) opened.
    pub(crate) fn close(&self, opened: &Opened) -> Result<()> {
        let base = DevicePtr::new(opened.cookie);
        let _opening = imports::opening();
        let import = {
            let mut table = imports::table();
            if let Some(import) = table.get_mut(&base).filter(|import| import.opens > 1) {
                import.opens -= 1;
                return Ok(());
            }
            // Before the vendor's close, after which the address may be somebody else's.
            table.remove(&base)
        };
        let Some(import) = import else {
            return Err(Error::InvalidRegion(format!("the range at {base} was closed before")));
        };
        let _current = self.enter(import.range.device)?;
        match import.by {
            Way::Key(key) => {
                // SAFETY: imported once, and closed here alone; the caller of `DeviceIpc::close` has finished all work on it.
                let status = unsafe { call!(self, aclrtIpcMemClose(key.as_ptr())) };
                tracing::debug!(bytes = import.range.len, status, "closed an IPC key");
                self.check("aclrtIpcMemClose", status)
            }
            Way::Shareable(blocks) => self.unmap(base, &blocks),
        }
    }

    /// Unmaps, gives the physical memory back, and then the addresses: in this order.
    fn unmap(&self, base: DevicePtr, blocks: &[Block]) -> Result<()> {
        let mut outcome = Ok(());
        let mut note =
            |call, status| outcome = std::mem::replace(&mut outcome, Ok(())).and(self.check(call, status));
        for block in blocks {
            // SAFETY: mapped by `Mapping::add`; no work uses it any longer.
            note("aclrtUnmapMem", unsafe { call!(self, aclrtUnmapMem(address(block.at))) });
            let physical = aclrtDrvMemHandle(block.physical as *mut _);
            // SAFETY: the handle is of `Mapping::add`, and nothing is mapped by it any longer.
            note("aclrtFreePhysical", unsafe { call!(self, aclrtFreePhysical(physical)) });
        }
        // SAFETY: reserved by `open_shareables`; nothing is mapped there any longer.
        note("aclrtReleaseMemAddress", unsafe { call!(self, aclrtReleaseMemAddress(address(base))) });
        outcome
    }

    fn import_refused(
        &self,
        call: &'static str,
        status: aclError,
        handle: &ReceivedHandle,
        on: DeviceOrdinal,
    ) -> Error {
        if is_out_of_memory(status) {
            let detail = format!("{}; close mappings that are idle", self.error(call, status, ""));
            return Error::OutOfMemory { device: on, bytes: handle.size, detail };
        }
        let across = handle.home != Some(on);
        let hint = match status {
            status if is_unsupported(status) => {
                format!("This chip or driver does not share memory: {NEEDED}, on 910, A2, A3, 310P or 950")
            }
            ACL_ERROR_RT_NO_PERMISSION => {
                "The driver's list of importers does not have this process; in containers whose process ids the driver \
                 does not tell apart set DEVICE_IPC_ASCEND_PID_VALIDATION=off in the exporter"
                    .to_owned()
            }
            ACL_ERROR_RT_DRV_INTERNAL_ERROR if across => {
                let home = match handle.home {
                    Some(home) => format!("device {home}"),
                    None if self.device(on).is_ok_and(|device| device.chip == Chip::A3) => format!(
                        "a device that {VISIBLE_DEVICES} hides from this process (the other die of this chip has to be \
                         visible)"
                    ),
                    None => format!("a device that {VISIBLE_DEVICES} hides from this process"),
                };
                format!(
                    "The memory lives on {home}, and the driver could not map it on device {on}: the cards may not be \
                     able to share by key (PCIe cards with drivers before 25.5.2 and firmware before 7.8.0.7.220), or \
                     the exporter has closed it. Update the Ascend HDK, open it at home (OpenBuilder::at_home), or \
                     have the exporter allocate it for shareable handles (DeviceMemory::allocate_as with kind 2), \
                     which such cards can open. The driver's log says more: ~/ascend/log/debug/plog"
                )
            }
            ACL_ERROR_RT_DRV_INTERNAL_ERROR | ACL_ERROR_RT_PARAM_INVALID => {
                "The exporter has closed or freed it or has ended, has not listed this process, or the handle is corrupt; \
                 the driver's log says more: ~/ascend/log/debug/plog"
                    .to_owned()
            }
            _ => String::new(),
        };
        self.error(call, status, &hint)
    }
}

/// Addresses that are being filled; given back with what was mapped there unless it is kept.
struct Mapping<'a> {
    driver: &'a Driver,
    base: DevicePtr,
    blocks: Vec<Block>,
}

impl Mapping<'_> {
    fn add(
        &mut self,
        handle: &ReceivedHandle,
        number: u64,
        size: u64,
        at: DevicePtr,
        on: DeviceOrdinal,
    ) -> Result<()> {
        let driver = self.driver;
        let mut physical = aclrtDrvMemHandle(std::ptr::null_mut());
        // SAFETY: writes one handle; the driver checks the number, whatever it is.
        let status = unsafe {
            call!(
                driver,
                aclrtMemImportFromShareableHandle(number, driver.device(on)?.number(), &raw mut physical)
            )
        };
        if status != ACL_SUCCESS {
            return Err(driver.import_refused("aclrtMemImportFromShareableHandle", status, handle, on));
        }
        // SAFETY: the addresses were reserved and nothing is mapped there; the driver checks the size against the
        // physical memory's.
        let status = unsafe { call!(driver, aclrtMapMem(address(at), size as usize, 0, physical, 0)) };
        if status != ACL_SUCCESS {
            let error = driver.error(
                "aclrtMapMem",
                status,
                "The size that the exporter states has to be the whole of the physical memory's",
            );
            driver.release_physical(physical);
            return Err(error);
        }
        self.blocks.push(Block { number, physical: physical.0 as usize, at, size });
        Ok(())
    }

    fn keep(mut self) -> Vec<Block> {
        let blocks = std::mem::take(&mut self.blocks);
        std::mem::forget(self);
        blocks
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.driver.unmap(self.base, &self.blocks) {
            tracing::warn!(%error, "a mapping that failed could not be undone");
        }
    }
}

fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { backend: NAME, what: what.into(), why: why.into() }
}
