//! Memory of another process as a tensor of candle's.
//!
//! A [`CudaSlice`] frees its memory when it is dropped, and candle has no tensor without one. So the slice is lent: it
//! goes into the tensor's storage while the memory is mapped, and is taken out of there, by an in-place operation, before
//! the mapping ends. In its place it leaves a byte of a type that no operation of candle's accepts. Clones, views and
//! reshaped tensors share the storage, so none of them has the address any more.

use std::mem;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Storage, Tensor};
use device_ipc::{DeviceRange, Mapping};

use crate::dtype::{to_candle, with_type};

/// A tensor over memory of another process, and the mapping that keeps the memory.
///
/// [`tensor`](Self::tensor) can be cloned, and used as any other. When this is released or dropped, what is left of it
/// holds no memory: operations with it are errors. What was computed from it is candle's own and stays.
#[derive(Debug)]
pub struct MappedTensor {
    tensor: Tensor,
    device: CudaDevice,
    /// What takes the slice's place.
    husk: TakeOut,
    /// Dropped after the slice has been taken out.
    mapping: Option<Mapping>,
}

impl MappedTensor {
    /// The mapping as a tensor on `device`, whose stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// For a mapping that is read-only (candle can write to every tensor), has no shape, gaps or an element type that
    /// candle lacks, or is on another device.
    pub fn new(mapping: Mapping, device: &Device) -> Result<Self> {
        let cuda = device.as_cuda_device()?.clone();
        let stream = cuda.cuda_stream();
        let ordinal = stream.context().ordinal();
        ensure!(
            mapping.device().index() == ordinal,
            "the memory is opened on device {}, and candle's device is {ordinal}; open it with .on(&stream) of the latter",
            mapping.device()
        );
        ensure!(
            mapping.access().is_writable(),
            "the mapping is read-only, and candle's tensors can be written"
        );
        let layout = mapping.layout().context("the exporter stated no shape and element type")?;
        ensure!(layout.is_contiguous(), "the tensor has gaps: {layout:?}");
        let dtype =
            to_candle(layout.dtype()).with_context(|| format!("candle has no {:?}", layout.dtype()))?;
        let shape =
            layout.shape().iter().map(|size| Ok(usize::try_from(*size)?)).collect::<Result<Vec<_>>>()?;
        mapping.wait_ready(&stream)?;
        // What can fail is done before the slice is made: whoever drops that frees the memory.
        let husk = TakeOut::new(&cuda)?;
        let range = mapping.range();
        let storage = with_type!(dtype, T => lend::<T>(range, shape.iter().product(), &cuda)?);
        let tensor = Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
        Ok(Self { tensor, device: cuda, husk, mapping: Some(mapping) })
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Ends the mapping when the device's stream gets here: what has been submitted may still use the memory. Does not
    /// wait.
    ///
    /// # Errors
    ///
    /// What the driver says; the mapping then ends when the device has finished all its work.
    pub fn release(mut self) -> Result<()> {
        self.take_out();
        let stream = self.device.cuda_stream();
        match self.mapping.take() {
            Some(mapping) => Ok(mapping.release(&stream)?),
            None => Ok(()),
        }
    }

    /// Nobody holds a lock on the storage across this, as operations do only while they are submitted.
    fn take_out(&self) {
        if self.husk.is_there()
            && let Err(error) = self.tensor.inplace_op1(&self.husk)
        {
            // The storage still has the address: it must not be dropped, and the memory must not go.
            unreachable!("a contiguous tensor on a CUDA device accepts in-place operations: {error}");
        }
    }
}

impl Drop for MappedTensor {
    fn drop(&mut self) {
        self.take_out();
    }
}

/// The storage of a tensor over memory that is somebody else's. Dropping it would free that.
fn lend<T: CudaDType>(range: DeviceRange, count: usize, device: &CudaDevice) -> Result<CudaStorage> {
    let address = range.ptr.get();
    ensure!(address.is_multiple_of(align_of::<T>() as u64), "elements at {} are not aligned", range.ptr);
    ensure!(
        (count as u64).checked_mul(size_of::<T>() as u64).is_some_and(|bytes| bytes <= range.len),
        "{count} elements do not lie in {} bytes",
        range.len
    );
    // SAFETY: the mapping holds `count` aligned elements. That the slice is not dropped while they are not its own is what
    // `MappedTensor` is for.
    let slice = unsafe { device.cuda_stream().upgrade_device_ptr::<T>(address, count) };
    Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
}

/// Takes the slice out of a tensor's storage, once, and frees nothing.
#[derive(Debug)]
struct TakeOut(Mutex<Option<CudaStorage>>);

impl TakeOut {
    fn new(device: &CudaDevice) -> Result<Self> {
        // A type of which candle has no operations, not even copies.
        let slice = CudaStorageSlice::F6E2M3(device.alloc_zeros::<u8>(1)?);
        Ok(Self(Mutex::new(Some(CudaStorage { slice, device: device.clone() }))))
    }

    fn is_there(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

impl InplaceOp1 for TakeOut {
    fn name(&self) -> &'static str {
        "take-out"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("the tensor is not on a CUDA device")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let Some(husk) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() else { return Ok(()) };
        forget(mem::replace(storage, husk).slice);
        Ok(())
    }
}

/// Lets go of a slice's events and stream, not of its memory. Its stream waits for the uses on other streams that cudarc
/// knows of.
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
