//! One process shares bytes, another one compiles a kernel for them when it runs, by NVRTC, and adds 3 to each of them
//! in place. In two terminals, on a machine with a GPU:
//!
//! ```text
//! cargo run --example cuda_nvrtc -- share bytes.ipc
//! cargo run --example cuda_nvrtc -- add bytes.ipc
//! ```
//!
//! The second one needs `libnvrtc.so` (`libnvrtc.so.13`, `.12`), which the CUDA toolkit and PyTorch bring along, where the
//! dynamic linker looks; else say where it is:
//!
//! ```text
//! export LD_LIBRARY_PATH=/usr/local/cuda/lib64
//! export LD_LIBRARY_PATH=$(python3 -c 'import nvidia, pathlib
//! print(":".join(str(lib.parent) for folder in nvidia.__path__ for lib in pathlib.Path(folder).rglob("libnvrtc.so*")))')
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts, sys::is_culib_present};
use device_ipc::cuda::interop::CudaMappedMut;
use device_ipc::{Descriptor, Ipc, cuda};

/// How many bytes are shared.
pub(crate) const COUNT: usize = 1000;

/// Calls `published` when the file is there.
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

/// Compiles the kernel for the device of the stream. PTX of another architecture than the device has is refused when it
/// is loaded, so that the device is asked which one it is.
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
        "loading what NVRTC compiled; the error UNSUPPORTED_PTX_VERSION means that NVRTC is newer than the driver",
    )?;
    Ok(module.load_function("add")?)
}

/// cudarc panics where the library is missing.
pub(crate) fn check_nvrtc() -> Result<()> {
    // SAFETY: the initialisers of NVRTC run, which is what loading it means.
    let present = unsafe { is_culib_present() };
    ensure!(
        present,
        "libnvrtc.so is not where the dynamic linker looks; it comes with the CUDA toolkit (lib64) and with PyTorch \
         (nvidia/*/lib beside torch in site-packages): name the folder in LD_LIBRARY_PATH"
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
    // SAFETY: the kernel takes an array, a byte and the array's length, and does not go beyond that.
    unsafe { stream.launch_builder(kernel).arg(&mut bytes).arg(&value).arg(&count).launch(config)? };
    Ok(())
}

/// Whole or not at all, so that a receiver that waits for the file never reads half a line.
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
        _ => bail!("say: share FILE, or add FILE"),
    }
    Ok(())
}
