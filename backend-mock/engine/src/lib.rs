//! A machine with several accelerators, simulated on the CPU.
//!
//! Code that shares device memory between processes fails where two real processes interact: one exits, frees
//! memory, does not wait, or opens a stale handle. Testing that needs no accelerator, but real processes, real
//! shared memory and asynchronous work. The engine provides these to the mock backend and to the simulators of
//! vendor libraries, which play the vendors' lifetimes and failures with it.
//!
//! A [`Machine`] has:
//!
//! * **devices**: the process sees those that its [`MachineConfig`] makes visible, with a [`PeerMatrix`] between them;
//! * **memory**: one sealed memory file per allocation. An [`Address`] is where it is mapped in this process, and only the
//!   engine dereferences it. A handle is 64 bytes, alone or with a file descriptor;
//! * **virtual memory management**: blocks of physical memory without an address, reserved addresses without memory, and
//!   access by device to mappings;
//! * **streams**: a queue and a thread each. Work starts with a delay ([`MachineConfig::latency`]), so that a missing wait
//!   is detected;
//! * **events** whose state lies in shared memory, and 64-bit words that streams write and wait for;
//! * **faults** that are injected by name, and **counters** of calls.
//!
//! There are two lifetimes ([`Lifetime`]): importers pin the memory, as with CUDA, or the exporter's termination
//! revokes it, as with Ascend.
//!
//! The engine needs `/proc`, stores nothing in a file system, and leaves nothing behind when a process is killed.
//! `fork` without `exec` is not supported: in the child every call returns [`EngineError::Forked`].
//!
//! The modules are layers, each of which uses only those below it: `machine` (the calls), `memory` and `streams`
//! (tables of a process), `shared` (objects of several processes), `system` (the operating system), `model`
//! (values).
//!
//! ```
//! use device_ipc_mock_engine::{Machine, MachineConfig};
//!
//! let machine = Machine::new(MachineConfig::default());
//! let stream = machine.create_stream(0)?;
//! let block = machine.allocate(0, 16)?;
//! machine.write_from_host(block, &[0; 16], stream)?;
//! machine.add_f32(block, 4, 1.5, stream)?;
//! let bytes = machine.read_to_host(block, 16, stream)?;
//! assert_eq!(bytes[..4], 1.5f32.to_ne_bytes());
//! machine.free(block)?;
//! # Ok::<(), device_ipc_mock_engine::EngineError>(())
//! ```

#![cfg(target_os = "linux")]
#![warn(missing_debug_implementations)]

#[cfg(test)]
extern crate self as device_ipc_mock_engine;

mod machine;
mod memory;
mod model;
mod shared;
mod streams;
#[cfg(test)]
#[path = "../tests/suite/mod.rs"]
mod suite;
mod system;

pub use machine::{BlockInfo, DeviceInfo, KernelMemory, Machine, MappedBlock, Part, RangeInfo};
pub use model::{
    Access, Address, BlockId, ConfigError, Counters, DeviceConfig, EngineError, EventId, Fault, Lifetime,
    MachineConfig, Operation, PeerMatrix, Revocation, StreamId,
};
pub use shared::HANDLE_BYTES;
pub use shared::node::NODE_VARIABLE;
