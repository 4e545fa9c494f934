//! Hands weights from a trainer to engines on the same machine, with device-ipc and the CUDA backend alone.
//!
//! CI compiles this crate: `default-features = false, features = ["cuda"]` gives everything that it needs.

use std::sync::Arc;
use std::time::Duration;

use device_ipc::cuda::cudarc::driver::{CudaSlice, CudaStream};
use device_ipc::cuda::interop::CudaMappedMut;
use device_ipc::{Descriptor, Error, Export, Ipc, Mapping, RecoverableError};

/// Weights that engines may open.
#[derive(Debug)]
pub struct Published {
    export: Export,
}

/// Publishes weights that `stream` writes.
///
/// # Errors
///
/// As [`device_ipc::ShareBuilder::start`].
pub fn publish(weights: CudaSlice<f32>, stream: &Arc<CudaStream>) -> Result<Published, Error> {
    let export = Ipc::named("cuda")?.share(weights).ready_on(stream).start()?;
    Ok(Published { export })
}

impl Published {
    /// Returns the line that engines open the weights by.
    pub fn address(&self) -> String {
        self.export.descriptor().to_string()
    }

    /// Waits until all engines have released the weights. Gives them back if one keeps them for longer.
    ///
    /// # Errors
    ///
    /// The reason, and the export, which still keeps the weights.
    pub fn retire(self, patience: Duration) -> Result<(), RecoverableError<Export>> {
        self.export.close(patience)
    }
}

/// Weights of a trainer, on the device of an engine's stream.
#[derive(Debug)]
pub struct Opened {
    mapping: Mapping,
}

/// Opens weights. `stream` waits until they are ready.
///
/// # Errors
///
/// As [`device_ipc::OpenBuilder::on`].
pub fn open(address: &str, stream: &Arc<CudaStream>) -> Result<Opened, Error> {
    let descriptor: Descriptor = address.parse()?;
    Ok(Opened { mapping: Ipc::named("cuda")?.open(&descriptor).on(stream)? })
}

impl Opened {
    /// Returns the weights as cudarc knows them.
    ///
    /// # Errors
    ///
    /// As [`Mapping::view_mut`].
    pub fn weights(&self, stream: &Arc<CudaStream>) -> Result<CudaMappedMut<'_, f32>, Error> {
        self.mapping.view_mut(stream)
    }

    /// Releases the weights when `stream` reaches this point.
    ///
    /// # Errors
    ///
    /// As [`Mapping::release`].
    pub fn release(self, stream: &Arc<CudaStream>) -> Result<(), Error> {
        Ok(self.mapping.release(stream)?)
    }
}
