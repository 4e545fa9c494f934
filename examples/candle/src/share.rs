//! Sharing of a candle tensor.

use anyhow::{Context as _, Result, bail, ensure};
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::DevicePtr as _;
use candle_core::{CudaStorage, Storage, Tensor};
use device_ipc::{DeviceOrdinal, DevicePtr, DeviceRange, Export, Ipc, OwnedRegion, Region, cuda};

use crate::dtype::{to_ours, with_type};

/// Shares a tensor in place, with its shape and element type. The export keeps the tensor; importers' streams wait for the
/// work that has been submitted to the tensor's device so far.
///
/// # Safety
///
/// No operation replaces the storage of the tensor while the export exists. candle's operations do not; an
/// [`InplaceOp1`](candle_core::InplaceOp1) of the caller could.
///
/// # Errors
///
/// Fails for a tensor that is not on a CUDA device, has gaps or an unsupported element type, or whose memory cannot be
/// shared: call [`make_pool_shareable`](device_ipc::cuda::make_pool_shareable) before candle allocates.
pub unsafe fn share(ipc: &Ipc, tensor: &Tensor) -> Result<Export> {
    let dtype = to_ours(tensor.dtype()).with_context(|| {
        format!("tensors of {} are not supported by this example", tensor.dtype().as_str())
    })?;
    ensure!(tensor.is_contiguous(), "the tensor is not contiguous; share tensor.contiguous()?");
    let range = range_of(tensor)?;
    let region = Region::new(cuda::NAME, range).with_dtype(dtype);
    // SAFETY: the clone keeps the storage, and as the caller guarantees, the storage keeps the memory.
    let owner = unsafe { OwnedRegion::new(tensor.clone(), region) };
    let shape: Vec<u64> = tensor.dims().iter().map(|size| *size as u64).collect();
    let stream = tensor.device().as_cuda_device()?.cuda_stream();
    Ok(ipc.share(owner).shape(shape).ready_on(&stream).start()?)
}

fn range_of(tensor: &Tensor) -> Result<DeviceRange> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("the tensor is not on a CUDA device; share tensor.to_device(&device)?");
    };
    let (first, count) = (layout.start_offset(), layout.shape().elem_count());
    with_type!(tensor.dtype(), T => range_in::<T>(storage, first, count))
}

fn range_in<T: CudaDType>(storage: &CudaStorage, first: usize, count: usize) -> Result<DeviceRange> {
    let slice = storage.as_cuda_slice::<T>()?;
    let stream = slice.stream();
    let (address, _guard) = slice.device_ptr(stream);
    let device = DeviceOrdinal::new(u32::try_from(stream.context().ordinal())?);
    let size = size_of::<T>() as u64;
    Ok(DeviceRange::new(device, DevicePtr::new(address + first as u64 * size), count as u64 * size))
}
