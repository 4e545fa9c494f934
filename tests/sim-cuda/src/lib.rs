//! A `libcuda` that runs on the CPU.
//!
//! Code that shares device memory fails between real processes, and CI has no two GPUs. This shared library has the
//! driver's symbols. Unmodified programs load it in place of the driver (`LD_LIBRARY_PATH` with a link
//! `libcuda.so.1`, see [`install()`]). It behaves as the driver does, including its defects, and injects faults.
//! Devices, memory, streams and events are those of the mock's engine (`device-ipc-mock-engine`).
//!
//! Where this library and a GPU differ, the GPU is right. The program `cuda-probes` prints one line for each rule
//! of a driver. It runs on both, and a test compares the outputs: `tests/probes.txt` is that of two H200, driver
//! 580.159.04. `tests/gpu-differences.txt` lists permitted differences, and `tests/probes-not-run.txt` the probes
//! that were not run on a GPU, with their sources.
//!
//! Some rules cause hangs and crashes: `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister` and
//! `cuIpcCloseMemHandle` wait for all streams of the context and block every other thread's call on it meanwhile.
//! Where the driver crashes (a stream of another context waits for a `CU_EVENT_INTERPROCESS` event in its creator,
//! a stream or an event is used after its context was reset), the process is aborted with a line on stderr. An
//! event opens also after it was destroyed or its exporter has exited, and a pool's allocation after it was freed:
//! the driver does not detect that. Most bytes of a memory handle are ignored.
//!
//! # Configuration
//!
//! The variable [`VARIABLE`] has entries separated by semicolons, all optional:
//!
//! | entry | meaning |
//! |---|---|
//! | `devices=2` | the number of GPUs |
//! | `memory=64MiB` | the memory of each GPU (1 GiB) |
//! | `peers=all`, `none`, `0>1,1>0` | peer access between devices |
//! | `latency=50us` | the delay before each operation of a stream |
//! | `driver=12020` | the version that `cuDriverGetVersion` returns (13000) |
//! | `fault=cuIpcOpenMemHandle:2:304` | the second call fails with status 304 (any number); several separated by commas |
//! | `imex` | an IMEX channel exists, and fabric handles work |
//! | `mps` | the devices are reported as used through MPS; a fault still ends the context of its own process only |
//!
//! `CUDA_VISIBLE_DEVICES` works as with the driver: ordinals, or prefixes of UUIDs, in any order.
//!
//! An older driver lacks functions. [`install_without`] makes a copy of the library without these symbols;
//! `cuGetProcAddress` does not find them either.
//!
//! # Limitations
//!
//! * Graphs can be captured, but not launched. Textures, arrays, migration of managed memory and cubins are not
//!   supported; the symbols of unsupported functions are missing.
//! * Kernels are PTX, interpreted one instruction and one thread at a time. Modules with communication between
//!   threads of a block (shared memory, barriers, atomics) are rejected at load.
//! * `cuMemGetInfo` counts only allocations of this process, unless `DEVICE_IPC_MOCK_NODE` names a node; pools of
//!   other processes never count.
//! * A stream that waits for an event of a dead process fails with `CUDA_ERROR_LAUNCH_FAILED`. On a GPU it never
//!   completes.
//! * Across pid namespaces both processes must share the network namespace.

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

/// The environment variable that describes the machine and the driver.
pub const VARIABLE: &str = "DEVICE_IPC_SIM_CUDA";
