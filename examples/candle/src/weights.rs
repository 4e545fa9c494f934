//! The named tensors of a mapping as the variables of a candle model.
//!
//! # Copies
//!
//! | candle's device | tensors |
//! |---|---|
//! | CUDA, and the memory is mapped on this device | the mapped memory, without a copy, as long as the [`Weights`] live |
//! | CUDA, but another element type is requested, the tensor has gaps, or it is mapped on another device | memory of candle |
//! | the CPU | memory of candle: its tensors own a `Vec`, which cannot refer to memory of others |
//!
//! Memory of candle is independent of the mapping.

#[cfg(feature = "cuda")]
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Error, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use device_ipc::{Dtype, Ipc, Mapping};

use crate::dtype::{shape_of, to_candle};
#[cfg(feature = "cuda")]
use crate::lent::LentTensor;

/// The tensors of a mapping, from which candle builds models.
///
/// Keep this value as long as the model on a CUDA device: its tensors are the mapped memory. The drop releases the mapping;
/// operations on remaining tensors are errors then, as are further requests of a [`VarBuilder`].
///
/// The memory of a keeper is read-only, which candle does not know. No layer of candle writes to its weights; a kernel that does
/// destroys the CUDA context of this process, not the weights.
pub struct Weights {
    shared: Arc<Shared>,
}

/// The state that the variable builders share.
struct Shared {
    ipc: Ipc,
    device: Device,
    /// `None` after the drop of the [`Weights`].
    opened: Mutex<Option<Opened>>,
}

struct Opened {
    /// The tensors by name whose memory candle has; dropped before the mapping.
    #[cfg(feature = "cuda")]
    lent: HashMap<String, LentTensor>,
    mapping: Mapping,
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opened = self.shared.opened();
        f.debug_struct("Weights")
            .field("device", &self.shared.device)
            .field("mapping", &opened.as_ref().map(|opened| &opened.mapping))
            .finish_non_exhaustive()
    }
}

impl Weights {
    /// Makes the tensors of a mapping available to candle's `device`.
    ///
    /// Open the mapping by `.on(&stream)` with the stream of a CUDA device, so that its tensors are not copied, and by
    /// `.at_home()` for [`Device::Cpu`].
    ///
    /// # Errors
    ///
    /// Fails with an error of the driver.
    pub fn new(ipc: &Ipc, mapping: Mapping, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            mapping.wait_ready(&device.cuda_stream())?;
        }
        let opened = Opened {
            #[cfg(feature = "cuda")]
            lent: HashMap::new(),
            mapping,
        };
        let shared = Shared { ipc: ipc.clone(), device: device.clone(), opened: Mutex::new(Some(opened)) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns a builder of models with these weights. Tensors of another element type are converted.
    pub fn var_builder(&self, dtype: DType) -> VarBuilder<'static> {
        let backend = Box::new(Backend(Arc::clone(&self.shared)));
        VarBuilder::from_backend(backend, dtype, self.shared.device.clone())
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        let opened = self.shared.opened().take();
        drop(opened);
    }
}

impl Shared {
    fn opened(&self) -> MutexGuard<'_, Option<Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The source of the tensors of a variable builder.
struct Backend(Arc<Shared>);

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            return Err(Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected: shape,
                got: tensor.shape().clone(),
            }
            .bt());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let mut opened = self.0.opened();
        let Some(opened) = &mut *opened else {
            candle_core::bail!(
                "cannot load {name}: the weights have been dropped; keep them as long as the model"
            );
        };
        if opened.mapping.get(name).is_err() {
            return Err(Error::CannotFindTensor { path: name.to_owned() }.bt());
        }
        let loaded = opened.load(&self.0, name, device);
        loaded.map_err(|error| Error::wrap(format!("cannot load {name}: {error:#}")))?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.opened().as_ref().is_some_and(|opened| opened.mapping.get(name).is_ok())
    }
}

impl Opened {
    /// Returns a tensor of the element type that it has.
    fn load(&mut self, shared: &Shared, name: &str, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if device.is_cuda()
            && device.same_device(&shared.device)
            && let Some(tensor) = self.lend(name, device)?
        {
            return Ok(tensor);
        }
        self.copy(&shared.ipc, name, device)
    }

    /// Returns the tensor in the mapped memory, unless candle cannot have it there.
    #[cfg(feature = "cuda")]
    fn lend(&mut self, name: &str, device: &Device) -> Result<Option<Tensor>> {
        if let Some(lent) = self.lent.get(name) {
            return Ok(Some(lent.tensor().clone()));
        }
        let tensor = self.mapping.get(name)?;
        let (range, layout) = (tensor.range(), tensor.layout());
        let is_here = range.device.index() == device.as_cuda_device()?.cuda_stream().context().ordinal();
        // The address of a tensor without elements has no meaning.
        let Some(dtype) =
            to_candle(layout.dtype()).filter(|_| is_here && layout.is_contiguous() && range.len > 0)
        else {
            return Ok(None);
        };
        // SAFETY: the field `lent` is dropped before the mapping.
        let lent = unsafe { LentTensor::new(range, dtype, shape_of(layout.shape())?, device)? };
        let tensor = lent.tensor().clone();
        self.lent.insert(name.to_owned(), lent);
        Ok(Some(tensor))
    }

    /// Returns a copy in candle's memory, by way of the host.
    fn copy(&self, ipc: &Ipc, name: &str, device: &Device) -> Result<Tensor> {
        let tensor = self.mapping.get(name)?;
        let shape = shape_of(tensor.shape())?;
        let stream = ipc.create_stream(tensor.device())?;
        let bytes = tensor.to_host_bytes(&stream)?;
        let dtype = match tensor.dtype() {
            // As candle's loader of safetensors files does, because candle has no such type.
            Dtype::U16 => {
                let numbers = bytes.as_chunks().0.iter().map(|number| u32::from(u16::from_ne_bytes(*number)));
                return Ok(Tensor::from_vec(numbers.collect::<Vec<_>>(), shape, device)?);
            }
            Dtype::F8_E4M3FN => DType::F8E4M3,
            dtype => to_candle(dtype)
                .with_context(|| format!("element type {dtype:?} is not supported by candle"))?,
        };
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &shape, device)?)
    }
}
