//! A machine with several accelerators, acted out by the CPU.
//!
//! Why: the code that shares device memory between processes breaks where two
//! real processes meet: one dies, frees, forgets to wait, opens a handle that
//! has gone stale. None of that needs an accelerator, all of it needs real
//! processes, real shared memory and work that runs *later*. This crate gives
//! exactly that, so that the mock backend, and simulators of vendor libraries,
//! can be wrong in the ways in which vendors' drivers are wrong, and fail on
//! demand.
//!
//! What a [`Machine`] has:
//!
//! * **devices**, of which the process sees those that its [`MachineConfig`]
//!   makes visible, with a [`PeerMatrix`] between them;
//! * **memory**: one sealed memory file per allocation. An [`Address`] is where
//!   it is mapped in this process, and nothing outside the engine dereferences
//!   it. It travels as 64 bytes alone, or as a file descriptor and 64 bytes;
//! * **virtual memory management**: blocks of physical memory without an address,
//!   ranges of addresses without memory, and access by device to what is mapped;
//! * **streams**: a queue and a thread each. Work starts late on purpose
//!   ([`MachineConfig::latency`]), so that a forgotten wait shows;
//! * **events** whose state lies in shared memory, and 64-bit words that streams
//!   write and wait on;
//! * **faults** that are injected by name, and **counters** of calls.
//!
//! Two lifetimes are played ([`Lifetime`]): importers pin the memory, as with
//! CUDA, or the exporter's end revokes it, as with Ascend.
//!
//! The engine needs `/proc`, keeps nothing in a file system, and leaves nothing
//! behind when a process is killed. `fork` without `exec` is not supported: in
//! the child every call returns [`EngineError::Forked`].
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

mod machine;
mod memory;
mod model;
mod shared;
mod streams;
mod system;

pub use machine::{BlockInfo, DeviceInfo, KernelMemory, Machine, MappedBlock, Part, RangeInfo};
pub use model::{
    Access, Address, BlockId, ConfigError, Counters, DeviceConfig, EngineError, EventId, Fault, Lifetime,
    MachineConfig, Operation, PeerMatrix, Revocation, StreamId,
};
pub use shared::HANDLE_BYTES;
pub use shared::node::NODE_VARIABLE;
