//! Imported memory as a candle tensor.

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor};
use device_ipc::Mapping;

use crate::dtype::{shape_of, to_candle};
use crate::lent::LentTensor;

/// A tensor of imported memory, with the mapping that keeps the memory.
///
/// [`tensor`](Self::tensor) can be cloned and used like any other tensor. After this guard is released or dropped, remaining
/// clones have no memory and operations on them are errors. Results computed from the tensor remain valid.
#[derive(Debug)]
pub struct MappedTensor {
    /// Dropped before the mapping.
    tensor: LentTensor,
    mapping: Mapping,
}

impl MappedTensor {
    /// Creates a tensor from a mapping on `device`, whose stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// Fails for a mapping that is read-only (candle can write to every tensor), has no shape, has gaps, has an element type
    /// that candle lacks, or is on another device.
    pub fn new(mapping: Mapping, device: &Device) -> Result<Self> {
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
        let shape = shape_of(layout.shape())?;
        mapping.wait_ready(&device.as_cuda_device()?.cuda_stream())?;
        // SAFETY: the tensor is dropped before the mapping, by the order of the fields and in `release`.
        let tensor = unsafe { LentTensor::new(mapping.range(), dtype, shape, device)? };
        Ok(Self { tensor, mapping })
    }

    /// Returns the tensor.
    pub fn tensor(&self) -> &Tensor {
        self.tensor.tensor()
    }

    /// Releases the mapping when the device's stream reaches this point, so that submitted work may still use the memory.
    /// Does not block.
    ///
    /// # Errors
    ///
    /// Fails with an error of the driver; the mapping is then released when the device has completed all its work.
    pub fn release(self) -> Result<()> {
        let stream = self.tensor().device().as_cuda_device()?.cuda_stream();
        let Self { tensor, mapping } = self;
        drop(tensor);
        Ok(mapping.release(&stream)?)
    }
}
