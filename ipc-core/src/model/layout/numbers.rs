//! Shape and strides of a tensor in one vector, and their limits.

use std::fmt;

use smallvec::{SmallVec, smallvec};

/// Maximum number of dimensions of a layout (as in NumPy and PyTorch).
pub const MAX_DIMENSIONS: usize = 64;

/// Maximum size in bytes of the gathered elements of a tensor that repeats elements, as a stride of 0 does. A tensor without
/// repeated elements is limited by its memory instead.
pub(crate) const MAX_REPEATED_BYTES: u64 = 64 << 20;

/// Maximum number of dimensions that need no allocation.
const INLINE: usize = 4;

/// The sizes of the dimensions, followed by as many strides.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Numbers(SmallVec<[u64; 2 * INLINE]>);

impl Numbers {
    /// Creates the numbers of `dimensions` dimensions, each of size and stride 0.
    pub(super) fn of(dimensions: usize) -> Self {
        Self(smallvec![0; 2 * dimensions])
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u64] {
        &mut self.0
    }

    /// Returns the sizes and the strides.
    pub(super) fn halves(&self) -> (&[u64], &[u64]) {
        self.0.split_at(self.0.len() / 2)
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.halves().fmt(f)
    }
}
