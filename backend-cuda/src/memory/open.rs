//! Opens and closes memory of other processes, of every kind. The received handle states its kind.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use device_ipc_core::backend::{Opened, ReceivedHandle};
use device_ipc_core::{Access, DeviceOrdinal, Error, Result};

use super::kind::{self, FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
use super::pool::import::{ImportedPools, OpenPointer};
use super::received::{cannot_be_read_only, common_kind, unsupported};
use super::virtual_memory::block::Mapping;
use super::{fabric, legacy, virtual_memory};
use crate::objects::driver::Driver;

/// The open memory of other processes.
#[derive(Debug, Default)]
pub(crate) struct OpenTable {
    open: Mutex<Entries>,
    pools: ImportedPools,
}

/// The open ranges, by [`Opened::cookie`].
#[derive(Debug, Default)]
struct Entries {
    last_cookie: u64,
    by_cookie: HashMap<u64, OpenRange>,
}

/// An open range, by how it is closed.
#[derive(Debug)]
enum OpenRange {
    /// By `cuIpcCloseMemHandle` of this address.
    Legacy(u64),
    /// By unmapping its blocks.
    Mapped(Mapping),
    /// By closing a pointer of a pool.
    Pool(OpenPointer),
}

impl OpenTable {
    /// Opens handles of one kind as one range on device `on`.
    pub(crate) fn open(
        &self,
        driver: &Arc<Driver>,
        handles: &[ReceivedHandle],
        on: DeviceOrdinal,
        access: Access,
    ) -> Result<Opened> {
        driver.device(on)?;
        let kind = common_kind(handles)?;
        if !access.is_writable() && !matches!(kind, VIRTUAL_MEMORY | FABRIC) {
            return Err(cannot_be_read_only(kind));
        }
        for handle in handles {
            check_peer_access(driver, on, handle)?;
        }
        let current = driver.enter(on)?;
        let (range, open) = match kind {
            LEGACY => legacy::open(driver, handles, on).map(|(range, base)| (range, OpenRange::Legacy(base))),
            VIRTUAL_MEMORY => virtual_memory::import::open(driver, handles, on, access)
                .map(|(range, mapping)| (range, OpenRange::Mapped(mapping))),
            POOL => {
                self.pools.open(driver, handles, on).map(|(range, pointer)| (range, OpenRange::Pool(pointer)))
            }
            FABRIC => fabric::import::open(driver, handles, on, access)
                .map(|(range, mapping)| (range, OpenRange::Mapped(mapping))),
            other => Err(unsupported(
                &format!("open a handle of kind {}", other.0),
                "this version supports the kinds 1 (legacy), 2 (virtual-memory), 3 (pool) and 4 (fabric); update the \
                 importer, or have the exporter export one of these kinds",
            )),
        }?;
        drop(current);
        let kind = kind::name(kind);
        tracing::debug!(target: crate::LOG, kind, device = %on, bytes = range.len, %access, "opened a CUDA handle");
        Ok(Opened { range, cookie: self.insert(open) })
    }

    /// Closes a range that [`open`](Self::open) opened.
    pub(crate) fn close(&self, driver: &Driver, opened: &Opened) -> Result<()> {
        let device = opened.range.device;
        let Some(open) = self.remove(opened.cookie) else {
            return Err(Error::InvalidRegion(format!(
                "no memory that this backend opened is open at {}; it may already be closed",
                opened.range.ptr
            )));
        };
        let _current = driver.enter(device)?;
        let closed = match open {
            OpenRange::Legacy(base) => legacy::close(driver, base),
            OpenRange::Mapped(mapping) => mapping.close(),
            OpenRange::Pool(pointer) => self.pools.close(driver, &pointer),
        };
        tracing::debug!(target: crate::LOG, %device, bytes = opened.range.len, ok = closed.is_ok(), "closed a CUDA handle");
        closed
    }

    fn insert(&self, open: OpenRange) -> u64 {
        let mut entries = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        entries.last_cookie += 1;
        let cookie = entries.last_cookie;
        entries.by_cookie.insert(cookie, open);
        cookie
    }

    fn remove(&self, cookie: u64) -> Option<OpenRange> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).by_cookie.remove(&cookie)
    }
}

/// Refuses a device without peer access before the driver opens anything, if the home device is visible here.
pub(super) fn check_peer_access(driver: &Driver, on: DeviceOrdinal, handle: &ReceivedHandle) -> Result<()> {
    match handle.home {
        Some(home) if !driver.peer_access(on, home)? => {
            let to = driver.device(home)?.info.identity;
            Err(Error::NoPeerAccess { from: on, to })
        }
        _ => Ok(()),
    }
}
