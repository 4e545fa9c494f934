//! Shape and strides side by side: of most tensors without an allocation.

use std::fmt;

/// What has no more dimensions than this needs no allocation.
const INLINE: usize = 4;

/// The sizes of the dimensions, and behind them as many strides.
#[derive(Clone)]
pub(super) enum Numbers {
    Inline { dimensions: u8, numbers: [u64; 2 * INLINE] },
    Boxed(Box<[u64]>),
}

impl Numbers {
    /// Of so many dimensions, each with size and stride 0.
    pub(super) fn of(dimensions: usize) -> Self {
        if dimensions <= INLINE {
            return Self::Inline { dimensions: dimensions as u8, numbers: [0; 2 * INLINE] };
        }
        Self::Boxed(vec![0; 2 * dimensions].into())
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u64] {
        match self {
            Self::Inline { dimensions, numbers } => &mut numbers[..2 * usize::from(*dimensions)],
            Self::Boxed(numbers) => numbers,
        }
    }

    fn as_slice(&self) -> &[u64] {
        match self {
            Self::Inline { dimensions, numbers } => &numbers[..2 * usize::from(*dimensions)],
            Self::Boxed(numbers) => numbers,
        }
    }

    /// The sizes, and the strides.
    pub(super) fn halves(&self) -> (&[u64], &[u64]) {
        let all = self.as_slice();
        all.split_at(all.len() / 2)
    }
}

impl PartialEq for Numbers {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Numbers {}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.halves().fmt(f)
    }
}
