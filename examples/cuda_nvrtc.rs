//! One process shares bytes, and another one compiles a kernel at run time with NVRTC that adds 3 to each byte in place. In two terminals, on a machine with a GPU:
//!
//! ```text
//! cargo run --example cuda_nvrtc -- share bytes.ipc
//! cargo run --example cuda_nvrtc -- add bytes.ipc
//! ```
//!
//! The second process requires `libnvrtc.so` (`libnvrtc.so.13`, `.12`) of the CUDA toolkit or of PyTorch in the search path of
//! the dynamic linker; set the path if necessary:
//!
//! ```text
//! export LD_LIBRARY_PATH=/usr/local/cuda/lib64
//! export LD_LIBRARY_PATH=$(python3 -c 'import nvidia, pathlib
//! print(":".join(str(lib.parent) for directory in nvidia.__path__ for lib in pathlib.Path(directory).rglob("libnvrtc.so*")))')
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts, sys::is_culib_present};
use device_ipc::cuda::interop::CudaMappedMut;
use device_ipc::{Descriptor, Ipc, cuda};

/// Number of shared bytes.
pub(crate) const COUNT: usize = 1000;

/// Shares the bytes, and calls `published` when the descriptor file is written.
pub(crate) fn share(path: &Path, published: impl FnOnce()) -> Result<Vec<u8>> {
    let stream = CudaContext::new(0)?.default_stream();
    let bytes = Arc::new(cuda::clone_htod(&stream, &[1u8; COUNT])?);
    let share = Ipc::auto()?.share(bytes.clone()).ready_on(&stream).start()?;
    publish(path, &share.descriptor().to_string())?;
    published();
    share.wait_released(Duration::from_secs(60))?;
    Ok(stream.clone_dtoh(&*bytes)?)
}

pub(crate) fn add(path: &Path) -> Result<()> {
    let stream = CudaContext::new(0)?.default_stream();
    let kernel = compile(&stream)?;
    let descriptor: Descriptor = std::fs::read_to_string(path)?.parse()?;
    let bytes = Ipc::auto()?.open(&descriptor).on(&stream)?;
    launch(&stream, &kernel, bytes.view_mut(&stream)?, 3)?;
    bytes.release(&stream)?;
    Ok(())
}

const SOURCE: &str = r#"
extern "C" __global__ void add(unsigned char *bytes, unsigned char value, unsigned long long count)
{
    unsigned long long index = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) {
        bytes[index] += value;
    }
}
"#;

/// Compiles the kernel for the architecture of the stream's device, because the driver rejects PTX of a newer architecture.
fn compile(stream: &CudaStream) -> Result<CudaFunction> {
    check_nvrtc()?;
    let (major, minor) = stream.context().compute_capability()?;
    let architecture = format!("--gpu-architecture=compute_{major}{minor}");
    let options = CompileOptions { options: vec![architecture], ..CompileOptions::default() };
    let ptx = compile_ptx_with_opts(SOURCE, options).map_err(|error| match error {
        CompileError::CompileError { log, .. } => anyhow::anyhow!("{}", log.to_string_lossy()),
        error => anyhow::anyhow!("NVRTC: {error:?}"),
    })?;
    let module = stream.context().load_module(ptx).context(
        "cannot load the compiled kernel; the error UNSUPPORTED_PTX_VERSION means that NVRTC is newer than the driver",
    )?;
    Ok(module.load_function("add")?)
}

/// Returns an error if NVRTC is missing, because cudarc panics in that case.
pub(crate) fn check_nvrtc() -> Result<()> {
    // SAFETY: loading NVRTC runs its initializers, which have no preconditions.
    let present = unsafe { is_culib_present() };
    ensure!(
        present,
        "libnvrtc.so not found by the dynamic linker; it is part of the CUDA toolkit (lib64) and of PyTorch \
         (nvidia/*/lib in site-packages): add its directory to LD_LIBRARY_PATH"
    );
    Ok(())
}

fn launch(
    stream: &Arc<CudaStream>,
    kernel: &CudaFunction,
    mut bytes: CudaMappedMut<'_, u8>,
    value: u8,
) -> Result<()> {
    let count = bytes.len() as u64;
    let config = LaunchConfig::for_num_elems(u32::try_from(count)?);
    // SAFETY: the kernel takes an array, a byte and the array's length, and stays within the array.
    unsafe { stream.launch_builder(kernel).arg(&mut bytes).arg(&value).arg(&count).launch(config)? };
    Ok(())
}

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
        ["share", path] => {
            let bytes = share(path.as_ref(), || println!("waiting for: add {path}"))?;
            println!("{} bytes, the first of which is now {}", bytes.len(), bytes[0]);
        }
        ["add", path] => add(path.as_ref())?,
        _ => bail!("usage: cuda_nvrtc share FILE | add FILE"),
    }
    Ok(())
}
