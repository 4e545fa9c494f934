//! The device-ipc backend that needs no hardware.
//!
//! Why: the code that shares device memory goes wrong between real processes, and CI has no accelerator. This backend
//! is a real one, on the engine of `device-ipc-mock-engine`: several devices whose memory lies in shared memory, streams
//! that run later on threads of their own, a peer matrix, events, and the vendors' different rules to choose from.
//!
//! Take it with [`MockBackend::from_spec`], or with `DEVICE_IPC_BACKEND=mock`; then `DEVICE_IPC_MOCK` describes the
//! machine, in the words of [`MachineConfig::from_spec`](device_ipc_mock_engine::MachineConfig::from_spec) and
//! [`HandleForm`]:
//!
//! ```text
//! DEVICE_IPC_MOCK='devices=2;visible=1,0;lifetime=revoking;handles=fds'
//! ```

//!
//! Free memory ([`memory_info`](device_ipc_core::DeviceMemory::memory_info)) is that of the whole device where
//! [`NODE_VARIABLE`](engine::NODE_VARIABLE) names a node, as the conformance suite does for each case. Without it a process
//! sees its own allocations only, so that tests that run side by side do not disturb each other.

mod backend;
mod errors;
mod event;
mod host_pages;
mod kinds;
mod memory;
mod spec;
mod stream;
mod timelines;

pub use backend::{MockBackend, REGISTRATION};
pub use device_ipc_mock_engine as engine;
pub use kinds::NAME;
pub use spec::{HandleForm, MACHINE_VARIABLE};

device_ipc_core::register_backend!(REGISTRATION);
