//! One process shares a slice of cudarc, and another one adds 1 to it in place. In two terminals, on a machine with a GPU:
//!
//! ```text
//! cargo run --example cuda_hand_over -- send w.ipc
//! cargo run --example cuda_hand_over -- receive w.ipc
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use cudarc::driver::{CudaContext, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use device_ipc::cuda::interop::CudaMappedMut;
use device_ipc::{Descriptor, Ipc, cuda};

pub(crate) fn sender(path: &Path) -> Result<Vec<f32>> {
    cuda::make_pool_shareable(0)?; // once: later allocations of cudarc on this device can be shared
    let stream = CudaContext::new(0)?.default_stream(); // cudarc, or any other owner of device memory
    let weights = Arc::new(stream.clone_htod(&[1f32; 20])?);
    let share = Ipc::auto()?.share(weights.clone()).shape([4, 5]).ready_on(&stream).start()?;
    publish(path, &share.descriptor().to_string())?;
    share.wait_released(Duration::from_secs(30))?; // the error names pid, program and bytes
    Ok(stream.clone_dtoh(&*weights)?)
}

pub(crate) fn receiver(path: &Path) -> Result<()> {
    let stream = CudaContext::new(0)?.default_stream();
    let descriptor: Descriptor = std::fs::read_to_string(path)?.parse()?;
    let tensor = Ipc::auto()?.open(&descriptor).on(&stream)?; // the stream waits for `ready`, not the host
    tensor.on_gone(|error| eprintln!("{error}"));
    add_one(&stream, tensor.view_mut(&stream)?)?; // element type and access are checked
    tensor.release(&stream)?; // the lease ends when the stream reaches this point
    Ok(())
}

/// Launches a kernel of the receiver on memory of another process.
fn add_one(stream: &Arc<CudaStream>, mut tensor: CudaMappedMut<'_, f32>) -> Result<()> {
    let module = stream.context().load_module(Ptx::from_src(ADD_ONE))?;
    let kernel = module.load_function("add_one")?;
    let config =
        LaunchConfig { grid_dim: (1, 1, 1), block_dim: (tensor.len() as u32, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel takes one array, and the launch has one thread per element.
    unsafe { stream.launch_builder(&kernel).arg(&mut tensor).launch(config)? };
    Ok(())
}

const ADD_ONE: &str = r"
.version 6.0
.target sm_50
.address_size 64
.visible .entry add_one(.param .u64 array)
{
    .reg .u32 %r1;
    .reg .u64 %rd<4>;
    .reg .f32 %f<3>;
    ld.param.u64 %rd1, [array];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    add.f32 %f2, %f1, 0f3F800000;
    st.global.f32 [%rd3], %f2;
    ret;
}
";

/// Writes the file atomically, so that a waiting receiver never reads a partial line.
fn publish(path: &Path, line: &str) -> Result<()> {
    let unfinished = path.with_extension("part");
    std::fs::write(&unfinished, line)?;
    Ok(std::fs::rename(unfinished, path)?)
}

#[allow(dead_code, reason = "a test runs the two roles without it")]
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["send", path] => println!("after the receiver: {:?}", sender(path.as_ref())?),
        ["receive", path] => receiver(path.as_ref())?,
        _ => bail!("usage: cuda_hand_over send FILE | receive FILE"),
    }
    Ok(())
}
