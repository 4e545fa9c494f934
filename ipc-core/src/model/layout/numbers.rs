//! Shape and strides of a tensor in one vector.

use std::fmt;

use smallvec::{SmallVec, smallvec};

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
