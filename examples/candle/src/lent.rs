//! Imported memory in the storage of a candle tensor, for a limited time.
//!
//! A [`CudaSlice`] frees its memory on drop, and every candle tensor on a CUDA device contains one. Therefore the slice is lent: it
//! is in the tensor's storage while the memory is mapped, and an in-place operation replaces it before the mapping is released.
//! The replacement is one byte of a type that no operation of candle accepts. Clones, views and reshaped tensors share the
//! storage, so none of them retains the address.

use std::mem;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};
use device_ipc::DeviceRange;

use crate::dtype::with_type;

/// A tensor of imported memory, which has no memory after the drop of this value.
#[derive(Debug)]
pub(crate) struct LentTensor {
    tensor: Tensor,
    /// Replaces the slice in the storage.
    replacement: ReplaceStorage,
}

impl LentTensor {
    /// Creates a contiguous tensor in this memory.
    ///
    /// # Errors
    ///
    /// Fails for memory that is on another device, unaligned or too small, and for an element type that candle lacks.
    ///
    /// # Safety
    ///
    /// The memory is mapped until this value has been dropped.
    pub(crate) unsafe fn new(
        range: DeviceRange,
        dtype: DType,
        shape: Vec<usize>,
        device: &Device,
    ) -> Result<Self> {
        let cuda = device.as_cuda_device()?;
        let ordinal = cuda.cuda_stream().context().ordinal();
        ensure!(
            range.device.index() == ordinal,
            "the memory is opened on device {}, but candle uses device {ordinal}; open it with .on(&stream) of that device",
            range.device
        );
        // All fallible steps precede the creation of the slice, because dropping the slice would free the memory.
        let replacement = ReplaceStorage::new(cuda)?;
        // SAFETY: as the caller guarantees, the memory is mapped until the slice has been replaced.
        let storage = with_type!(dtype, T => unsafe { lend::<T>(range, shape.iter().product(), cuda)? });
        let tensor = Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
        Ok(Self { tensor, replacement })
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for LentTensor {
    /// Replaces the storage. No operation holds its lock at this time, because locks are held only during submission.
    fn drop(&mut self) {
        if let Err(error) = self.tensor.inplace_op1(&self.replacement) {
            // The storage still contains the address: neither may it be dropped nor the memory released.
            unreachable!("a contiguous tensor on a CUDA device accepts in-place operations: {error}");
        }
    }
}

/// Returns a storage of imported memory. It must not be dropped, as that would free the memory.
///
/// # Safety
///
/// The memory is mapped as long as the storage exists.
unsafe fn lend<T: CudaDType>(range: DeviceRange, count: usize, device: &CudaDevice) -> Result<CudaStorage> {
    let address = range.ptr.get();
    ensure!(address.is_multiple_of(align_of::<T>() as u64), "the elements at {} are not aligned", range.ptr);
    ensure!(
        (count as u64).checked_mul(size_of::<T>() as u64).is_some_and(|bytes| bytes <= range.len),
        "{count} elements exceed the {} B of the mapping",
        range.len
    );
    // SAFETY: the memory contains `count` aligned elements. `LentTensor` guarantees that the slice is never dropped.
    let slice = unsafe { device.cuda_stream().upgrade_device_ptr::<T>(address, count) };
    Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
}

/// An in-place operation that replaces the slice of a tensor's storage once, and frees no memory.
#[derive(Debug)]
struct ReplaceStorage(Mutex<Option<CudaStorage>>);

impl ReplaceStorage {
    fn new(device: &CudaDevice) -> Result<Self> {
        // A type for which candle has no operations, not even copies.
        let slice = CudaStorageSlice::F6E2M3(device.alloc_zeros::<u8>(1)?);
        Ok(Self(Mutex::new(Some(CudaStorage { slice, device: device.clone() }))))
    }
}

impl InplaceOp1 for ReplaceStorage {
    fn name(&self) -> &'static str {
        "replace-storage"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("the tensor is not on a CUDA device")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let Some(replacement) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Ok(());
        };
        forget(mem::replace(storage, replacement).slice);
        Ok(())
    }
}

/// Drops a slice's events and stream without freeing its memory. Its stream waits for uses on other streams that cudarc
/// has recorded.
fn forget(slice: CudaStorageSlice) {
    fn leak<T>(slice: CudaSlice<T>) {
        let _address = slice.leak();
    }
    match slice {
        CudaStorageSlice::U8(slice)
        | CudaStorageSlice::F6E2M3(slice)
        | CudaStorageSlice::F6E3M2(slice)
        | CudaStorageSlice::F4(slice)
        | CudaStorageSlice::F8E8M0(slice) => leak(slice),
        CudaStorageSlice::U32(slice) => leak(slice),
        CudaStorageSlice::I16(slice) => leak(slice),
        CudaStorageSlice::I32(slice) => leak(slice),
        CudaStorageSlice::I64(slice) => leak(slice),
        CudaStorageSlice::BF16(slice) => leak(slice),
        CudaStorageSlice::F16(slice) => leak(slice),
        CudaStorageSlice::F32(slice) => leak(slice),
        CudaStorageSlice::F64(slice) => leak(slice),
        CudaStorageSlice::F8E4M3(slice) => leak(slice),
    }
}
