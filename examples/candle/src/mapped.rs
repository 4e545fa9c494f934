//! Imported memory as a candle tensor.
//!
//! A [`CudaSlice`] frees its memory on drop, and every candle tensor contains one. Therefore the slice is lent: it is in the
//! tensor's storage while the memory is mapped, and an in-place operation replaces it before the mapping is released. The
//! replacement is one byte of a type that no operation of candle accepts. Clones, views and reshaped tensors share the
//! storage, so none of them retains the address.

use std::mem;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Storage, Tensor};
use device_ipc::{DeviceRange, Mapping};

use crate::dtype::{to_candle, with_type};

/// A tensor of imported memory, with the mapping that keeps the memory.
///
/// [`tensor`](Self::tensor) can be cloned and used like any other tensor. After this guard is released or dropped, remaining
/// clones have no memory and operations on them are errors. Results computed from the tensor remain valid.
#[derive(Debug)]
pub struct MappedTensor {
    tensor: Tensor,
    device: CudaDevice,
    /// Replaces the slice in the storage.
    replacement: ReplaceStorage,
    /// Dropped after the slice has been replaced.
    mapping: Option<Mapping>,
}

impl MappedTensor {
    /// Creates a tensor from a mapping on `device`, whose stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// Fails for a mapping that is read-only (candle can write to every tensor), has no shape, has gaps, has an element type
    /// that candle lacks, or is on another device.
    pub fn new(mapping: Mapping, device: &Device) -> Result<Self> {
        let cuda = device.as_cuda_device()?.clone();
        let stream = cuda.cuda_stream();
        let ordinal = stream.context().ordinal();
        ensure!(
            mapping.device().index() == ordinal,
            "the memory is opened on device {}, but candle uses device {ordinal}; open it with .on(&stream) of that device",
            mapping.device()
        );
        ensure!(
            mapping.access().is_writable(),
            "the mapping is read-only, but candle tensors are writable; share it with Access::ReadWrite"
        );
        let layout = mapping
            .layout()
            .context("the export has no shape and element type; share it with .dtype() and .shape()")?;
        ensure!(layout.is_contiguous(), "tensors with gaps are not supported: {layout:?}");
        let dtype = to_candle(layout.dtype())
            .with_context(|| format!("element type {:?} is not supported by candle", layout.dtype()))?;
        let shape =
            layout.shape().iter().map(|size| Ok(usize::try_from(*size)?)).collect::<Result<Vec<_>>>()?;
        mapping.wait_ready(&stream)?;
        // All fallible steps precede the creation of the slice, because dropping the slice would free the memory.
        let replacement = ReplaceStorage::new(&cuda)?;
        let range = mapping.range();
        let storage = with_type!(dtype, T => lend::<T>(range, shape.iter().product(), &cuda)?);
        let tensor = Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
        Ok(Self { tensor, device: cuda, replacement, mapping: Some(mapping) })
    }

    /// Returns the tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Releases the mapping when the device's stream reaches this point, so that submitted work may still use the memory.
    /// Does not block.
    ///
    /// # Errors
    ///
    /// Fails with an error of the driver; the mapping is then released when the device has completed all its work.
    pub fn release(mut self) -> Result<()> {
        self.replace_storage();
        let stream = self.device.cuda_stream();
        match self.mapping.take() {
            Some(mapping) => Ok(mapping.release(&stream)?),
            None => Ok(()),
        }
    }

    /// Replaces the storage. No operation holds its lock at this time, because locks are held only during submission.
    fn replace_storage(&self) {
        if self.replacement.is_available()
            && let Err(error) = self.tensor.inplace_op1(&self.replacement)
        {
            // The storage still contains the address: neither may it be dropped nor the memory released.
            unreachable!("a contiguous tensor on a CUDA device accepts in-place operations: {error}");
        }
    }
}

impl Drop for MappedTensor {
    fn drop(&mut self) {
        self.replace_storage();
    }
}

/// Returns a storage of imported memory. It must not be dropped, as that would free the memory.
fn lend<T: CudaDType>(range: DeviceRange, count: usize, device: &CudaDevice) -> Result<CudaStorage> {
    let address = range.ptr.get();
    ensure!(address.is_multiple_of(align_of::<T>() as u64), "the elements at {} are not aligned", range.ptr);
    ensure!(
        (count as u64).checked_mul(size_of::<T>() as u64).is_some_and(|bytes| bytes <= range.len),
        "{count} elements exceed the {} B of the mapping",
        range.len
    );
    // SAFETY: the mapping contains `count` aligned elements. `MappedTensor` guarantees that the slice is never dropped.
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

    fn is_available(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
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
