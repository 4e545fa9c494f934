//! An allocator of ranges, lowest first.
//!
//! The driver places a new block where the previously freed one was, so that a stale handle can name another
//! owner's memory.

use std::collections::BTreeMap;

/// The free parts of a range, by offset. No two of them are adjacent.
#[derive(Debug)]
pub(crate) struct Gaps {
    free: BTreeMap<u64, u64>,
    len: u64,
}

impl Gaps {
    /// Creates an allocator in which all of `start..len` is free.
    pub(crate) fn new(start: u64, len: u64) -> Self {
        Self { free: BTreeMap::from([(start, len - start)]), len: len - start }
    }

    /// Takes the lowest offset, a multiple of `unit`, with room for `size` bytes, rounded up to whole units.
    pub(crate) fn take(&mut self, size: u64, unit: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(unit)?;
        let (&offset, &gap) = self.free.iter().find(|(_, gap)| **gap >= size)?;
        self.free.remove(&offset);
        if gap > size {
            self.free.insert(offset + size, gap - size);
        }
        Some(offset)
    }

    /// Returns bytes that were taken with the same unit.
    pub(crate) fn give_back(&mut self, mut offset: u64, size: u64, unit: u64) {
        let mut size = size.next_multiple_of(unit);
        if let Some(gap) = self.free.remove(&(offset + size)) {
            size += gap;
        }
        if let Some((&before, &gap)) = self.free.range(..offset).next_back()
            && before + gap == offset
        {
            offset = before;
            size += gap;
        }
        self.free.insert(offset, size);
    }

    /// Returns whether nothing is taken.
    pub(crate) fn is_whole(&self) -> bool {
        self.free.values().sum::<u64>() == self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_gap_is_taken_and_gaps_merge() {
        let mut gaps = Gaps::new(0, 4096);
        let taken: Vec<_> = [100, 512, 513].map(|size| gaps.take(size, 512)).into();
        assert_eq!(taken, [Some(0), Some(512), Some(1024)]);
        gaps.give_back(512, 512, 512);
        assert_eq!(gaps.take(600, 512), Some(2048));
        assert_eq!(gaps.take(1, 512), Some(512));
        gaps.give_back(0, 100, 512);
        gaps.give_back(512, 1, 512);
        gaps.give_back(2048, 600, 512);
        assert!(!gaps.is_whole());
        gaps.give_back(1024, 513, 512);
        assert!(gaps.is_whole());
        assert_eq!(gaps.take(4097, 512), None);
    }
}
