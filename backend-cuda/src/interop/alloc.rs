//! Shareable slices, independent of the device's memory pool.
//!
//! cudarc allocates with `cuMemAllocAsync` on devices with memory pools, and memory of the default pool has no handle.
//! These functions return the same `CudaSlice`, with memory of `cuMemAlloc`. To make all slices shareable, use
//! [`make_pool_shareable`](crate::make_pool_shareable) instead.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits, result};
use device_ipc_core::{Error, Result};

use super::caller::{CallerState, refuse_capture};
use super::error::vendor_error;
use crate::interop::stream::ordinal;
use crate::library::status::number;

/// Allocates a slice of `len` zeros, in shareable memory.
///
/// Work that is submitted to `stream` afterwards sees the zeros.
///
/// # Freeing
///
/// The slice frees its memory like any slice of cudarc: by `cuMemFreeAsync` on its stream if the device has memory
/// pools, else by `cuMemFree` after waiting for the stream. The former is also correct for memory of `cuMemAlloc`:
/// according to the CUDA C++ Programming Guide, "Stream Ordered Memory Allocator", `cudaFreeAsync` can free memory of
/// `cudaMalloc`, with the same requirement that accesses have finished when the stream reaches this point.
///
/// # Errors
///
/// [`Error::InvalidRegion`] for zero bytes, [`Error::OutOfMemory`], else the driver's error.
pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
    stream: &Arc<CudaStream>,
    len: usize,
) -> Result<CudaSlice<T>> {
    let _caller = CallerState::save();
    refuse_capture(stream, "allocating memory")?;
    let mut slice = alloc(stream, len)?;
    stream.memset_zeros(&mut slice).map_err(|error| vendor_error("cuMemsetD8Async", error))?;
    Ok(slice)
}

/// Allocates a slice with a copy of `data`, in shareable memory. Waits for the copy.
///
/// It is freed like a slice of [`alloc_zeros`].
///
/// # Errors
///
/// As [`alloc_zeros`].
pub fn clone_htod<T: DeviceRepr>(stream: &Arc<CudaStream>, data: &[T]) -> Result<CudaSlice<T>> {
    let _caller = CallerState::save();
    refuse_capture(stream, "writing host bytes")?;
    let mut slice = alloc(stream, data.len())?;
    let copied = stream.memcpy_htod(data, &mut slice);
    // The caller owns the bytes, which the stream may read until it is idle.
    let waited = stream.synchronize();
    copied.map_err(|error| vendor_error("cuMemcpyHtoDAsync", error))?;
    waited.map_err(|error| vendor_error("cuStreamSynchronize", error))?;
    Ok(slice)
}

/// Allocates a slice of `len` uninitialised elements.
fn alloc<T: DeviceRepr>(stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<T>> {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes != 0);
    let bytes = bytes.ok_or_else(|| {
        Error::InvalidRegion(format!("cannot allocate {len} elements of {} bytes", size_of::<T>()))
    })?;
    stream.context().bind_to_thread().map_err(|error| vendor_error("cuCtxSetCurrent", error))?;
    // SAFETY: the callers write the memory before they read it.
    let address = unsafe { result::malloc_sync(bytes) }.map_err(|error| match error.0 as i32 {
        number::ERROR_OUT_OF_MEMORY => Error::OutOfMemory {
            device: ordinal(stream),
            bytes: bytes as u64,
            detail: "cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY".into(),
        },
        _ => vendor_error("cuMemAlloc", error),
    })?;
    // SAFETY: the allocation holds `len` elements, and the slice is its only owner.
    let slice = unsafe { slice_at(stream, address, len) };
    if slice.is_err() {
        // SAFETY: allocated above, and not owned by another value.
        let freed = unsafe { result::free_sync(address) };
        stream.context().record_err(freed);
    }
    slice
}

/// Returns the slice of `len` elements at `address`, which it frees when it is dropped.
///
/// # Safety
///
/// As `CudaStream::upgrade_device_ptr`: the address is valid for `len` elements, and the slice is its only owner (or is
/// never dropped).
pub(super) unsafe fn slice_at<T>(
    stream: &Arc<CudaStream>,
    address: CUdeviceptr,
    len: usize,
) -> Result<CudaSlice<T>> {
    // cudarc unwraps the creation of two events in there: try one here, where an error can be returned.
    if stream.context().is_event_tracking() {
        stream.context().new_event(None).map_err(|error| vendor_error("cuEventCreate", error))?;
    }
    // SAFETY: as the caller promised. A panic leaves no partially modified state behind.
    catch_unwind(AssertUnwindSafe(|| unsafe { stream.upgrade_device_ptr(address, len) })).map_err(|_| {
        Error::Unsupported {
            backend: crate::library::NAME,
            what: "create a slice of cudarc".into(),
            why: "cudarc could not create the events that it stores with every slice".into(),
        }
    })
}
