//! The raw side of a comparison: the vendor's own calls, without a broker, leases or a cache.
//!
//! For CUDA these are the calls of the driver, through cudarc. For other backends they are the calls of the backend, as the
//! library makes them, so that the difference is the cost of the library.

#![allow(unsafe_code, reason = "raw calls on memory, words and streams that the rows keep alive")]

mod backend;
mod cuda;

use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::Result;
use device_ipc::backend::{Exported, Opened};
use device_ipc::{BorrowedStream, DeviceRange, Ipc};
use serde::{Deserialize, Serialize};

/// A handle in the form in which one process sends it to another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RawHandle {
    kind: u16,
    bytes: Vec<u8>,
    size: u64,
    generation: Option<u64>,
    home: u32,
}

/// A handle that this process exported.
#[derive(Debug)]
pub(super) struct RawExport {
    pub(super) handle: RawHandle,
    /// The export to revoke; `None` if the vendor does not count exports.
    exported: Option<Exported>,
}

/// An opened handle.
#[derive(Debug)]
pub(super) struct RawMapping {
    pub(super) address: u64,
    /// The mapping to close; `None` if it is closed by its address.
    opened: Option<Opened>,
}

/// The calls that rows compare the library with.
pub(super) trait RawSide: Send + Sync {
    /// Returns the description of the calls for the report.
    fn name(&self) -> &'static str;

    /// Prepares the calling thread for calls on this device.
    fn enter(&self, _device: u32) -> Result<()> {
        Ok(())
    }

    /// Exports the allocation that contains a range.
    fn export(&self, range: DeviceRange) -> Result<RawExport>;

    /// Permits a process to open the handle, if the vendor requires that.
    fn authorize(&self, _export: &RawExport, _peer: &[u8]) -> Result<()> {
        Ok(())
    }

    /// Revokes the handle, if the vendor counts exports.
    fn unexport(&self, _export: RawExport) -> Result<()> {
        Ok(())
    }

    /// Opens a handle of another process.
    fn open(&self, handle: &RawHandle, device: u32) -> Result<RawMapping>;

    /// Closes an opened handle.
    fn close(&self, mapping: RawMapping) -> Result<()>;

    /// Creates two exported blocks that can be exchanged at one address; `None` if the raw side has no such calls.
    fn exchangeable(&self, _device: u32, _bytes: u64) -> Result<Option<Box<dyn Exchange>>> {
        Ok(None)
    }

    /// Registers a page of host memory for streams of the device until the process exits, and returns its device address.
    ///
    /// # Safety
    ///
    /// The page stays mapped until the process exits.
    unsafe fn register(&self, page: NonNull<u8>, bytes: usize, device: u32) -> Result<u64>;

    /// Submits a write of a word to the stream.
    ///
    /// # Safety
    ///
    /// The word is in registered memory or device memory until the stream has executed the write.
    unsafe fn write_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()>;

    /// Submits a wait of the stream until the word is at least this value.
    ///
    /// # Safety
    ///
    /// As for [`write_value`](Self::write_value).
    unsafe fn wait_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()>;

    /// Submits a copy between two devices of this process to a stream of the destination device.
    ///
    /// # Safety
    ///
    /// Both ranges stay allocated until the stream has executed the copy.
    unsafe fn copy_peer(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()>;
}

/// Two exported blocks, of which one is imported and mapped.
pub(super) trait Exchange {
    /// Imports the other block, unmaps the one that is mapped, maps the other one at its address, and releases the first import.
    fn exchange(&mut self) -> Result<()>;
}

/// Returns the raw side of a backend.
pub(super) fn of(ipc: &Ipc) -> Result<Arc<dyn RawSide>> {
    if ipc.backend().info().name == device_ipc::cuda::NAME {
        return Ok(Arc::new(cuda::CudaDriver::load()?));
    }
    Ok(Arc::new(backend::BackendCalls::new(ipc)))
}
