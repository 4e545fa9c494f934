//! Slices that can be shared, whatever the device's memory pool is.
//!
//! cudarc allocates by `cuMemAllocAsync` wherever the device has memory pools, and what comes from the default one has no
//! handle. These functions give the same `CudaSlice`, of memory of `cuMemAlloc`. Where all slices shall be shareable,
//! [`make_pool_shareable`](crate::make_pool_shareable) is the simpler way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits, result};
use device_ipc_core::{Error, Result};

use super::caller::{Caller, refuse_capture};
use super::error::vendor_error;
use crate::interop::stream::ordinal;
use crate::library::status::number;

/// A slice of `len` zeros, in memory that can be shared.
///
/// The zeros are there for work that is submitted to `stream` afterwards.
///
/// # Freeing
///
/// The slice is cudarc's and frees itself as any other: by `cuMemFreeAsync` on its stream where the device has memory
/// pools, else by `cuMemFree` after waiting for the stream. The former is right for memory of `cuMemAlloc` too: the CUDA
/// C++ Programming Guide, "Stream Ordered Memory Allocator", lets `cudaFreeAsync` free what `cudaMalloc` gave, with the
/// same promise that accesses have finished when the stream gets there.
///
/// # Errors
///
/// [`Error::InvalidRegion`] for zero bytes, [`Error::OutOfMemory`], else the driver's error.
pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
    stream: &Arc<CudaStream>,
    len: usize,
) -> Result<CudaSlice<T>> {
    let _caller = Caller::keep();
    refuse_capture(stream, "allocating memory")?;
    let mut slice = alloc(stream, len)?;
    stream.memset_zeros(&mut slice).map_err(|error| vendor_error("cuMemsetD8Async", error))?;
    Ok(slice)
}

/// A slice of these elements, in memory that can be shared. Waits until they are there.
///
/// See [`alloc_zeros`] for how it is freed.
///
/// # Errors
///
/// As [`alloc_zeros`].
pub fn clone_htod<T: DeviceRepr>(stream: &Arc<CudaStream>, data: &[T]) -> Result<CudaSlice<T>> {
    let _caller = Caller::keep();
    refuse_capture(stream, "writing bytes of the host")?;
    let mut slice = alloc(stream, data.len())?;
    let copied = stream.memcpy_htod(data, &mut slice);
    // The bytes are the caller's, and may be read until the stream has been waited for.
    let waited = stream.synchronize();
    copied.map_err(|error| vendor_error("cuMemcpyHtoDAsync", error))?;
    waited.map_err(|error| vendor_error("cuStreamSynchronize", error))?;
    Ok(slice)
}

/// A slice of `len` elements that nobody has written yet.
fn alloc<T: DeviceRepr>(stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<T>> {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes != 0);
    let bytes = bytes.ok_or_else(|| {
        Error::InvalidRegion(format!("{len} elements of {} bytes cannot be allocated", size_of::<T>()))
    })?;
    stream.context().bind_to_thread().map_err(|error| vendor_error("cuCtxSetCurrent", error))?;
    // SAFETY: the memory is not read before the callers have written it.
    let address = unsafe { result::malloc_sync(bytes) }.map_err(|error| match error.0 as i32 {
        number::ERROR_OUT_OF_MEMORY => Error::OutOfMemory {
            device: ordinal(stream),
            bytes: bytes as u64,
            detail: "cuMemAlloc says so".into(),
        },
        _ => vendor_error("cuMemAlloc", error),
    })?;
    // SAFETY: the allocation holds `len` elements, and the slice is its only owner.
    let slice = unsafe { slice_at(stream, address, len) };
    if slice.is_err() {
        // SAFETY: allocated above, and owned by nobody else.
        let freed = unsafe { result::free_sync(address) };
        stream.context().record_err(freed);
    }
    slice
}

/// The slice of `len` elements at `address`, which frees it when it is dropped.
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
    // cudarc unwraps the creation of two events in there: try one where an error can be returned.
    if stream.context().is_event_tracking() {
        stream.context().new_event(None).map_err(|error| vendor_error("cuEventCreate", error))?;
    }
    // SAFETY: as the caller promised. A panic leaves nothing behind that was touched.
    catch_unwind(AssertUnwindSafe(|| unsafe { stream.upgrade_device_ptr(address, len) })).map_err(|_| {
        Error::Unsupported {
            backend: crate::library::NAME,
            what: "make a slice of cudarc's".into(),
            why: "cudarc could not create the events that it keeps beside every slice".into(),
        }
    })
}
