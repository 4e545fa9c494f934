//! Opening and closing memory of another process.
//!
//! A file for each kind of handle, as in [`export`](crate::export): [`legacy`], [`virtual_memory`], [`pool`], [`fabric`].
//! The receiver does not have to know which kind comes: the handle says so.

mod fabric;
mod legacy;
pub(crate) mod pool;
mod virtual_memory;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::{Access, DeviceOrdinal, Error, HandleKind, Opened, ReceivedHandle, Result};

use crate::NAME;
use crate::backend::CudaBackend;
use crate::driver::Driver;
use crate::kinds::{self, FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
use crate::status::number;
use crate::virtual_memory::Mapping;

/// What is open, by the number that its [`Opened::cookie`] has.
#[derive(Debug, Default)]
pub(crate) struct OpenTable(Mutex<(u64, HashMap<u64, Open>)>);

/// What has to be done to close it again.
#[derive(Debug)]
enum Open {
    /// `cuIpcCloseMemHandle` of this address.
    Legacy(u64),
    /// Blocks that were mapped here.
    Mapped(Mapping),
    /// A pointer of a pool.
    Pool(pool::OpenPointer),
}

impl OpenTable {
    fn insert(&self, open: Open) -> u64 {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.0 += 1;
        let cookie = table.0;
        table.1.insert(cookie, open);
        cookie
    }

    fn remove(&self, cookie: u64) -> Option<Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&cookie)
    }
}

impl CudaBackend {
    /// Opens handles of one kind as one range for `on`.
    pub(crate) fn open_handles(
        &self,
        handles: &[ReceivedHandle],
        on: DeviceOrdinal,
        access: Access,
    ) -> Result<Opened> {
        let driver = self.driver();
        driver.device(on)?;
        let kind = the_kind_of(handles)?;
        if !access.is_writable() && !matches!(kind, VIRTUAL_MEMORY | FABRIC) {
            return Err(cannot_be_read_only(kind));
        }
        for handle in handles {
            driver.check_peer_access(on, handle)?;
        }
        let current = driver.enter(on)?;
        let (range, open) = match kind {
            LEGACY => legacy::open(driver, handles, on).map(|(range, base)| (range, Open::Legacy(base))),
            VIRTUAL_MEMORY => virtual_memory::open(driver, handles, on, access)
                .map(|(range, mapping)| (range, Open::Mapped(mapping))),
            POOL => pool::open(&self.imported_pools, driver, handles, on)
                .map(|(range, pointer)| (range, Open::Pool(pointer))),
            FABRIC => fabric::open(driver, handles, on, access)
                .map(|(range, mapping)| (range, Open::Mapped(mapping))),
            other => Err(unsupported(
                &format!("open a handle of kind {}", other.0),
                "this version knows the kinds 1 (legacy), 2 (virtual-memory), 3 (pool) and 4 (fabric); update the \
                 receiver, or have the exporter make a handle of one of them",
            )),
        }?;
        drop(current);
        let kind = kinds::name(kind);
        tracing::debug!(kind, device = %on, bytes = range.len, %access, "opened a CUDA handle");
        Ok(Opened { range, cookie: self.open.insert(open) })
    }

    /// Closes what [`open_handles`](Self::open_handles) opened.
    pub(crate) fn close_opened(&self, opened: &Opened) -> Result<()> {
        let device = opened.range.device;
        let Some(open) = self.open.remove(opened.cookie) else {
            return Err(Error::InvalidRegion(format!(
                "nothing is open at {} that this backend opened; it may be closed already",
                opened.range.ptr
            )));
        };
        let driver = self.driver();
        let _current = driver.enter(device)?;
        let closed = match open {
            Open::Legacy(base) => legacy::close(driver, base),
            Open::Mapped(mapping) => mapping.close(),
            Open::Pool(pointer) => self.imported_pools.close(driver, &pointer),
        };
        tracing::debug!(%device, bytes = opened.range.len, ok = closed.is_ok(), "closed a CUDA handle");
        closed
    }
}

impl Driver {
    /// Refuses what the hardware cannot do before anything is opened, where the home is visible here.
    fn check_peer_access(&self, on: DeviceOrdinal, handle: &ReceivedHandle) -> Result<()> {
        match handle.home {
            Some(home) if !self.peer_access(on, home)? => Err(self.no_peer_access(on, home)),
            _ => Ok(()),
        }
    }

    fn no_peer_access(&self, from: DeviceOrdinal, home: DeviceOrdinal) -> Error {
        match self.device(home) {
            Ok(home) => Error::NoPeerAccess { from, to: home.info.identity },
            Err(error) => error,
        }
    }
}

/// The kind that all of the handles are of.
fn the_kind_of(handles: &[ReceivedHandle]) -> Result<HandleKind> {
    let Some(first) = handles.first() else {
        return Err(unsupported("open 0 handles as one range", "a range has at least one allocation"));
    };
    match handles.iter().find(|handle| handle.kind != first.kind) {
        None => Ok(first.kind),
        Some(other) => Err(unsupported(
            &format!(
                "open handles of the kinds {} ({}) and {} ({}) as one range",
                first.kind.0,
                kinds::name(first.kind),
                other.kind.0,
                kinds::name(other.kind)
            ),
            "blocks of several kinds are not mapped side by side; the exporter has to share each by itself",
        )),
    }
}

/// The only handle, for kinds whose allocations cannot be mapped side by side.
fn the_only_one(handles: &[ReceivedHandle]) -> Result<&ReceivedHandle> {
    match handles {
        [handle] => Ok(handle),
        several => Err(unsupported(
            &format!("open {} handles as one range", several.len()),
            "a handle of this kind is one whole allocation; open each by itself",
        )),
    }
}

/// The bytes of a handle that has to have exactly as many, and that many file descriptors.
fn parts<const BYTES: usize, const FDS: usize>(
    handle: &ReceivedHandle,
) -> Result<(&[u8; BYTES], &[OwnedFd; FDS])> {
    let kind = kinds::name(handle.kind);
    let (bytes, fds) = (handle.bytes.as_slice(), handle.fds.as_slice());
    let misfit = |what: &str, want: usize, have: usize| {
        Error::Protocol(format!("a CUDA handle of kind {kind} has {want} {what}, and {have} came"))
    };
    Ok((
        bytes.try_into().map_err(|_| misfit("bytes", BYTES, bytes.len()))?,
        fds.try_into().map_err(|_| misfit("file descriptors", FDS, fds.len()))?,
    ))
}

fn cannot_be_read_only(kind: HandleKind) -> Error {
    unsupported(
        &format!("open a handle of kind {} ({}) read-only", kind.0, kinds::name(kind)),
        "CUDA maps these handles read-write only; open it read-write, receive a copy, or have the exporter share memory \
         of kind 2 (virtual-memory) or 4 (fabric), which the hardware keeps from being written",
    )
}

/// The error of an import of virtual memory or of a pool.
fn import_error(driver: &Driver, call: &'static str, status: i32) -> Error {
    let hint = match status {
        // What the driver says to descriptors of files (999), and to a pool's where a block's was said (801).
        number::ERROR_UNKNOWN
        | number::ERROR_NOT_SUPPORTED
        | number::ERROR_INVALID_VALUE
        | number::ERROR_INVALID_HANDLE => {
            "The handle is corrupt, or of another kind than was said; or the process has too many files open (ulimit -n)"
        }
        _ => "",
    };
    driver.error(call, status, hint)
}

fn out_of_memory(on: DeviceOrdinal, bytes: u64, call: &str) -> Error {
    Error::OutOfMemory {
        device: on,
        bytes,
        detail: format!("{call} could not map them; close mappings that are idle"),
    }
}

fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { backend: NAME, what: what.into(), why: why.into() }
}

#[cfg(test)]
mod tests;
