//! A `libcuda` that runs on the CPU.
//!
//! Why: what goes wrong when processes share device memory goes wrong between real processes, and no continuous
//! integration has two GPUs. This shared library has the driver's symbols; programs load it as they load the real one
//! (`LD_LIBRARY_PATH` with a link called `libcuda.so.1`, see [`install`]), and nothing in them is changed. It behaves as
//! the driver does, the unpleasant parts included, and can fail on demand. Devices, memory, streams and events are the
//! mock's engine (`device-ipc-mock-engine`).
//!
//! Where this library and a GPU disagree, the GPU is right. The program `cuda-probes` prints what a driver does, a line
//! for each rule; it runs on both, and a test compares the outputs: `tests/probes.txt` with that of two H200, driver
//! 580.159.04. Where they may differ is in `tests/gpu-differences.txt`, which probes were not run on a GPU, and what their
//! answers are founded on, in `tests/probes-not-run.txt`.
//!
//! Some rules worth knowing, since programs hang or crash on them: `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister` and
//! `cuIpcCloseMemHandle` wait for all streams of the context and hold up every other thread's call on it meanwhile;
//! where the real driver crashes (a stream of another context waits for a `CU_EVENT_INTERPROCESS` event in its creator, a
//! stream or such an event is used after its context was reset) the process is aborted with a line on stderr that says why. An
//! event opens also when it was destroyed or its exporter has ended, and a pool's allocation when it was freed: the driver does
//! not tell. Most bytes of a memory handle are not looked at.
//!
//! # Configuration
//!
//! One variable, [`VARIABLE`], with entries separated by semicolons; all may be left out:
//!
//! | entry | what it means |
//! |---|---|
//! | `devices=2` | how many GPUs there are |
//! | `memory=64MiB` | the size of each one's memory (1 GiB) |
//! | `peers=all`, `none`, `0>1,1>0` | which device reaches the memory of which |
//! | `latency=50us` | the time before each piece of work of a stream begins |
//! | `driver=12020` | the version that `cuDriverGetVersion` tells (13000) |
//! | `fault=cuIpcOpenMemHandle:2:304` | the second call fails with status 304, any number; several by commas |
//! | `imex` | there is an IMEX channel, and fabric handles work |
//!
//! `CUDA_VISIBLE_DEVICES` works as with the driver: ordinals, or prefixes of UUIDs, in any order.
//!
//! An older driver is one that lacks functions. `dlsym` cannot be taught that, so [`install_without`] makes a copy of the
//! library whose table of symbols does not have them; `cuGetProcAddress` does not find them in it either.
//!
//! # What is not played
//!
//! * Graphs can be captured, not launched. Textures, arrays, managed memory's migration and cubins are left out, as every
//!   function that is not there: its symbol is missing.
//! * Kernels are PTX, carried out an instruction at a time and a thread at a time: what threads of one block tell each
//!   other while they run (shared memory, barriers, atomics) is refused when the module is loaded.
//! * `cuMemGetInfo` counts this process's allocations only, unless `DEVICE_IPC_MOCK_NODE` names a node; other processes' pools
//!   never count.
//! * A stream that waits for an event whose recording process has died fails with `CUDA_ERROR_LAUNCH_FAILED`. On a GPU it waits
//!   for ever.
//! * Across pid namespaces both processes have to share the network namespace.

#![cfg(target_os = "linux")]

mod capture;
mod config;
mod context;
mod copy;
mod device;
mod directory;
mod entry;
mod event;
mod ffi;
mod gaps;
mod handle;
mod host;
mod ipc;
mod memory;
mod module;
mod pointer;
mod pool;
mod portal;
mod ptx;
mod record;
mod simulator;
mod status;
mod stream;
mod vmm;

mod install;

pub use install::{install, install_without, library};

/// The environment variable that describes the machine and the driver to play.
pub const VARIABLE: &str = "DEVICE_IPC_SIM_CUDA";
