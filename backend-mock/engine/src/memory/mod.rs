//! Device memory as this process has it mapped.

mod arena;
mod blocks;
mod imports;
mod lease;
mod mapping;
mod ranges;
mod span;
mod table;

pub(crate) use arena::{Arena, Reservation};
pub(crate) use blocks::{Block, BlockMapping, ReservedRange};
pub(crate) use imports::{Import, ImportKey};
pub(crate) use lease::{Lease, revoke_exports, wait_for_importers};
pub(crate) use mapping::{AddressSource, DeviceAccess, MappedObject, MappedPart, Mapping};
pub(crate) use span::Span;
pub(crate) use table::{MemoryTable, OwnedAllocation};
