//! Exports of memory that the library does not own: whether it is still the same is looked at again and again.

use std::sync::Arc;

use crate::backend::DeviceIpc;
use crate::model::address::{DeviceRange, Extent};

/// What borrowed memory was when it was exported.
#[derive(Clone, Debug)]
pub(crate) struct BorrowedMemory {
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) range: DeviceRange,
    pub(super) allocation: Option<DeviceRange>,
    pub(super) extents: Vec<Extent>,
}

impl BorrowedMemory {
    /// Is it still that? Asks the driver, so not on the poller's thread.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.backend.extents_of(self.range, self.allocation) {
            Ok(extents) if extents == self.extents => Ok(()),
            Ok(extents) => Err(format!("it was {}, and is {}", describe(&self.extents), describe(&extents))),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn describe(extents: &[Extent]) -> String {
    let one = |extent: &Extent| {
        let number =
            extent.generation.map_or_else(String::new, |generation| format!(" number {}", generation.0));
        format!("allocation{number} of {} bytes", extent.allocation.len)
    };
    extents.iter().map(one).collect::<Vec<_>>().join(", ")
}
