//! The backend: Ascend behind the traits of device-ipc.

mod ascend;
mod diagnosis;
mod diagnostics;
mod load;
mod memory;
mod reservations;
mod test_kernels;
mod timelines;

pub use ascend::AscendBackend;
pub use diagnostics::Observation;
pub use load::{LoadOptions, REGISTRATION};
