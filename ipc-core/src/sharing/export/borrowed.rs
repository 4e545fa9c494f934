//! Exports of memory that the library does not own, which is checked repeatedly.

use std::sync::Arc;

use crate::backend::DeviceIpc;
use crate::model::address::{DeviceRange, Extent};
use crate::model::one_or_many::OneOrMany;

/// Borrowed memory as it was when it was exported.
#[derive(Clone, Debug)]
pub(crate) struct BorrowedMemory {
    backend: Arc<dyn DeviceIpc>,
    pieces: OneOrMany<BorrowedPiece>,
}

/// One range of borrowed memory.
#[derive(Clone, Debug)]
pub(crate) struct BorrowedPiece {
    pub(super) range: DeviceRange,
    pub(super) allocation: Option<DeviceRange>,
    pub(super) extents: Vec<Extent>,
}

impl BorrowedMemory {
    pub(super) fn new(backend: &Arc<dyn DeviceIpc>, pieces: impl IntoIterator<Item = BorrowedPiece>) -> Self {
        Self { backend: Arc::clone(backend), pieces: pieces.into_iter().collect() }
    }

    /// Checks that the memory is unchanged. Calls the driver, so it must not run on the poller's thread.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.pieces.iter().try_for_each(|piece| {
            match self.backend.extents_of(piece.range, piece.allocation) {
                Ok(extents) if extents == piece.extents => Ok(()),
                Ok(extents) => {
                    Err(format!("it was {}, and is {}", describe(&piece.extents), describe(&extents)))
                }
                Err(error) => Err(error.to_string()),
            }
        })
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
