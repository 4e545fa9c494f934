//! The bare side: what the vendor's own calls cost, without a broker, leases or a cache.
//!
//! For CUDA these are the driver's, by cudarc's table. For other backends they are the backend's, called as the library
//! calls them, so that the difference is the library's own.

#![allow(unsafe_code, reason = "bare calls on memory, words and streams that the rows keep alive")]

mod bare;
#[cfg(feature = "cuda")]
mod cuda;

use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::Result;
use device_ipc::{BorrowedStream, DeviceRange, Exported, Ipc, Opened};
use serde::{Deserialize, Serialize};

/// A handle as one process tells it another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RawHandle {
    kind: u16,
    bytes: Vec<u8>,
    size: u64,
    generation: Option<u64>,
    home: u32,
}

/// A handle that this process made.
#[derive(Debug)]
pub(super) struct RawExport {
    pub(super) handle: RawHandle,
    /// What has to be taken back.
    exported: Option<Exported>,
}

/// What a handle was opened as.
#[derive(Debug)]
pub(super) struct RawMapping {
    pub(super) address: u64,
    /// What has to be closed.
    opened: Option<Opened>,
}

/// The calls that rows compare with.
pub(super) trait RawSide: Send + Sync {
    /// Whose calls they are, for the table.
    fn name(&self) -> &'static str;

    /// Readies the calling thread for calls that concern this device.
    fn enter(&self, device: u32) -> Result<()>;

    /// From an address in it to the handle of an allocation.
    fn export(&self, range: DeviceRange) -> Result<RawExport>;

    /// Lets a process open the handle, where the vendor keeps a whitelist.
    fn authorize(&self, export: &RawExport, peer: &[u8]) -> Result<()>;

    /// Takes the handle back, where the vendor counts.
    fn unexport(&self, export: RawExport) -> Result<()>;

    /// Opens a handle of another process.
    fn open(&self, handle: &RawHandle, device: u32) -> Result<RawMapping>;

    fn close(&self, mapping: RawMapping) -> Result<()>;

    /// Lets streams of the device use a page of host memory, for as long as the process lives; its address for them.
    ///
    /// # Safety
    ///
    /// The page stays mapped until the process ends.
    unsafe fn register(&self, page: NonNull<u8>, bytes: usize, device: u32) -> Result<u64>;

    /// The stream writes the word when it gets here.
    ///
    /// # Safety
    ///
    /// The word is registered, or device memory, until the stream has got there.
    unsafe fn write_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()>;

    /// The stream waits until the word is at least this.
    ///
    /// # Safety
    ///
    /// As for [`write_value`](Self::write_value).
    unsafe fn wait_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()>;

    /// May words lie in device memory too?
    fn has_device_words(&self) -> bool;

    /// Copies between two devices of this process, on a stream of the destination's.
    ///
    /// # Safety
    ///
    /// Both ranges stay allocated until the stream has done it.
    unsafe fn copy_peer(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()>;
}

/// The bare side of a backend.
pub(super) fn of(ipc: &Ipc) -> Result<Arc<dyn RawSide>> {
    #[cfg(feature = "cuda")]
    if ipc.backend().info().name == device_ipc::cuda::NAME {
        return Ok(Arc::new(cuda::Cuda::load()?));
    }
    Ok(Arc::new(bare::Bare::new(ipc)))
}
