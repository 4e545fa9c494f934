//! The device-ipc backend without hardware, for tests and CI.
//!
//! Code that shares device memory fails between real processes, and CI has no accelerator. This backend runs real
//! processes on the engine of `device-ipc-mock-engine`: several devices with memory in shared memory, asynchronous
//! streams with a thread each, a peer matrix, events, and a choice of the vendors' rules.
//!
//! [`MockBackend::from_spec`] creates it. `DEVICE_IPC_BACKEND=mock` selects it at run time; `DEVICE_IPC_MOCK` then
//! describes the machine, with the keys of
//! [`MachineConfig::from_spec`](device_ipc_mock_engine::MachineConfig::from_spec) and those of this backend:
//!
//! ```text
//! DEVICE_IPC_MOCK='devices=2;visible=1,0;lifetime=revoking;handles=fds'
//! DEVICE_IPC_MOCK='devices=2;like=cuda'
//! ```
//!
//! `docs/guide/mock.md` describes all keys. `like=cuda` and `like=ascend` give the machine the kinds of memory of the vendor.
//!
//! Free memory ([`memory_info`](device_ipc_core::backend::DeviceMemory::memory_info)) is that of the whole device if
//! [`NODE_VARIABLE`](engine::NODE_VARIABLE) names a node, as the conformance suite does for each case. Otherwise a
//! process counts only its own allocations, so that concurrent tests do not disturb each other.

#[cfg(test)]
extern crate self as device_ipc_mock;

mod backend;
mod errors;
mod event;
mod host_pages;
mod kinds;
mod memory;
mod profile;
mod received;
mod reservations;
mod spec;
mod stream;
#[cfg(test)]
#[path = "../tests/suite/mod.rs"]
mod suite;
mod timelines;

pub use backend::{MockBackend, REGISTRATION};
pub use device_ipc_mock_engine as engine;
pub use kinds::NAME;
pub use spec::{HandleForm, MACHINE_VARIABLE};

device_ipc_core::backend::register_backend!(REGISTRATION);
