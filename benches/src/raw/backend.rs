//! The calls of a backend, as the library makes them.

use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::backend::{DeviceIpc, DeviceTimelines, Generation, HandleBytes, HandleKind, ReceivedHandle};
use device_ipc::{Access, BorrowedStream, DeviceOrdinal, DevicePtr, DeviceRange, Ipc, ProcessIdentity};

use super::{RawExport, RawHandle, RawMapping, RawSide};

/// The calls of a backend.
pub(super) struct BackendCalls {
    backend: Arc<dyn DeviceIpc>,
}

impl BackendCalls {
    pub(super) fn new(ipc: &Ipc) -> Self {
        Self { backend: Arc::clone(ipc.backend()) }
    }

    fn timelines(&self) -> Result<&dyn DeviceTimelines> {
        self.backend.timelines().context("the backend does not support timelines")
    }
}

impl RawSide for BackendCalls {
    fn name(&self) -> &'static str {
        "the backend's own calls"
    }

    fn export(&self, range: DeviceRange) -> Result<RawExport> {
        let extents = self.backend.extents_of(range, Some(range))?;
        let [extent] = extents.as_slice() else {
            bail!("the memory consists of {} allocations instead of 1", extents.len())
        };
        let exported = self.backend.export(extent, None)?;
        let handle = RawHandle {
            kind: exported.kind.0,
            bytes: exported.bytes.as_slice().to_vec(),
            size: exported.extent.allocation.len,
            generation: exported.extent.generation.map(|generation| generation.0),
            home: range.device.get(),
        };
        ensure!(
            exported.fds.is_empty(),
            "handles with file descriptors are not supported: a text message cannot carry them"
        );
        Ok(RawExport { handle, exported: Some(exported) })
    }

    fn authorize(&self, export: &RawExport, peer: &[u8]) -> Result<()> {
        export.exported.as_ref().map_or(Ok(()), |exported| Ok(self.backend.authorize(exported, peer)?))
    }

    fn unexport(&self, export: RawExport) -> Result<()> {
        export.exported.map_or(Ok(()), |exported| Ok(self.backend.unexport(exported)?))
    }

    fn open(&self, handle: &RawHandle, device: u32) -> Result<RawMapping> {
        let received = ReceivedHandle {
            kind: HandleKind(handle.kind),
            bytes: HandleBytes::new(handle.bytes.as_slice()),
            fds: Vec::new(),
            size: handle.size,
            generation: handle.generation.map(Generation),
            home: Some(DeviceOrdinal::new(handle.home)),
            home_identity: None,
            exporter: ProcessIdentity::current()?,
        };
        let opened = self.backend.open(vec![received], DeviceOrdinal::new(device), Access::ReadWrite)?;
        Ok(RawMapping { address: opened.range.ptr.get(), opened: Some(opened) })
    }

    fn close(&self, mapping: RawMapping) -> Result<()> {
        mapping.opened.map_or(Ok(()), |opened| Ok(self.backend.close(opened)?))
    }

    unsafe fn register(&self, page: NonNull<u8>, bytes: usize, device: u32) -> Result<u64> {
        // SAFETY: the caller upholds the contract of this method.
        Ok(unsafe { self.timelines()?.register(DeviceOrdinal::new(device), page, bytes) }?.get())
    }

    unsafe fn write_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method.
        Ok(unsafe { self.timelines()?.write_value(DevicePtr::new(word), value, stream) }?)
    }

    unsafe fn wait_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method.
        Ok(unsafe { self.timelines()?.wait_value(DevicePtr::new(word), value, stream) }?)
    }

    unsafe fn copy_peer(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method.
        Ok(unsafe { self.backend.memory().copy(dst, src, stream) }?)
    }
}
