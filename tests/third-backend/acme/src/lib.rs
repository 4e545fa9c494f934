//! A backend for plain shared memory: one device, whose memory consists of sealed memory files.
//!
//! Its "driver" is the operating system, so that nothing has to be installed. A stream is a thread. The host accesses the memory at
//! the addresses of the device.

mod backend;
mod diagnosis;
mod memory;
mod stream;

pub use backend::{AcmeBackend, REGISTRATION};

/// The backend's name.
pub const NAME: &str = "acme";

device_ipc_core::backend::register_backend!(REGISTRATION);
