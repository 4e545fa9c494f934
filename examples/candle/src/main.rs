//! One process shares a candle tensor, and another one multiplies with it and doubles it in place. In two terminals, on a
//! machine with a GPU:
//!
//! ```text
//! device-ipc-candle-example share tensor.ipc
//! device-ipc-candle-example compute tensor.ipc
//! ```
//!
//! Or a candle layer has the weights of a keeper (`device-ipc keep model.safetensors --name llama`) in place:
//!
//! ```text
//! device-ipc-candle-example norm keeper:llama model.norm
//! ```
//!
//! `.ci/candle --build` builds it with or without a CUDA toolkit; with a toolkit, `cargo build --release` works too.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use candle_core::{DType, Device, Module as _, Tensor};
use candle_nn::rms_norm;
use device_ipc::{Descriptor, Ipc, cuda};
use device_ipc_candle_example::{MappedTensor, Weights, share};

fn exporter(path: &Path) -> Result<Tensor> {
    cuda::make_pool_shareable(0)?; // before candle allocates
    let device = Device::new_cuda_with_stream(0)?;
    let tensor = Tensor::arange(0f32, 6., &device)?.reshape((2, 3))?;
    // SAFETY: no operation here replaces the storage of the tensor.
    let share = unsafe { share(&Ipc::auto()?, &tensor)? };
    let unfinished = path.with_extension("part");
    std::fs::write(&unfinished, share.descriptor().to_string())?;
    std::fs::rename(unfinished, path)?;
    share.wait_released(Duration::from_secs(60))?;
    Ok(tensor)
}

fn importer(path: &Path) -> Result<Tensor> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let descriptor: Descriptor = std::fs::read_to_string(path)?.parse()?;
    let mapped = MappedTensor::new(Ipc::auto()?.open(&descriptor).on(&stream)?, &device)?;
    let tensor = mapped.tensor();
    let product = tensor.matmul(&tensor.t()?)?; // allocated by candle
    tensor.slice_set(&(tensor * 2.)?, 0, 0)?; // in the exporter's memory
    mapped.release()?;
    Ok(product)
}

fn norm(keeper: &str, layer: &str) -> Result<Tensor> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let ipc = Ipc::auto()?;
    // begin docs/guide/keeper.md
    let mapping = ipc.find(keeper, Duration::from_secs(30))?.open().on(&stream)?; // for Device::Cpu: at_home()
    let weights = Weights::new(&ipc, mapping, &device)?; // lives as long as the model
    let variables = weights.var_builder(DType::F32); // a candle_nn::VarBuilder
    // end
    let weight = variables.get_unchecked(&format!("{layer}.weight"))?;
    let norm = rms_norm(weight.elem_count(), 1e-5, variables.pp(layer))?;
    Ok(norm.forward(&weight.ones_like()?)?)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["share", path] => println!("after the importer: {}", exporter(path.as_ref())?),
        ["compute", path] => println!("its product with itself: {}", importer(path.as_ref())?),
        ["norm", keeper, layer] => println!("{}", norm(keeper, layer)?),
        _ => bail!("usage: device-ipc-candle-example share FILE | compute FILE | norm KEEPER LAYER"),
    }
    Ok(())
}
