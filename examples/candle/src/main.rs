//! One process shares a candle tensor, and another one multiplies with it and doubles it in place. In two terminals, on a
//! machine with a GPU:
//!
//! ```text
//! device-ipc-candle-example share tensor.ipc
//! device-ipc-candle-example compute tensor.ipc
//! ```
//!
//! `cargo xtask candle --build` builds it with or without a CUDA toolkit; with a toolkit, `cargo build --release` works too.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};
use device_ipc::{Descriptor, Ipc, cuda};
use device_ipc_candle_example::{MappedTensor, share};

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

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["share", path] => println!("after the importer: {}", exporter(path.as_ref())?),
        ["compute", path] => println!("its product with itself: {}", importer(path.as_ref())?),
        _ => bail!("usage: device-ipc-candle-example share FILE | compute FILE"),
    }
    Ok(())
}
