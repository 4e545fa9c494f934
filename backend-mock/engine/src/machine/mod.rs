//! A machine, and its calls by subject.

mod address_space;
mod allocation;
mod blocks;
mod events;
mod host_memory;
mod kernel;
mod sharing;
mod state;
mod streams;
mod value_wait;
mod work;

pub use address_space::MappedBlock;
pub use allocation::RangeInfo;
pub use blocks::BlockInfo;
pub use kernel::KernelMemory;
pub use sharing::Part;
pub use state::{DeviceInfo, Machine};
