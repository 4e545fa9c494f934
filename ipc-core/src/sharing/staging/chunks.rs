//! How a region is cut into chunks, and where each lies in the shared memory.

use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::sharing::host_pages::GRANULE;

/// The longest chunk: an importer maps and pins two of what its exporter says.
const LONGEST: u64 = 64 << 20;

/// A region in chunks. Chunk `n` lies in half `n % 2` of the shared memory, which has but one where one chunk is all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunks {
    region_bytes: u64,
    chunk_bytes: u64,
}

impl Chunks {
    /// Cuts a region of at least one byte into chunks of about so many bytes, and no longer than it needs.
    pub(crate) fn new(region_bytes: u64, wanted_bytes: u64) -> Self {
        let granule = GRANULE as u64;
        let whole = |bytes: u64| bytes.clamp(1, LONGEST).div_ceil(granule) * granule;
        Self { region_bytes, chunk_bytes: whole(wanted_bytes).min(whole(region_bytes)) }
    }

    /// The same region in chunks as an exporter says.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for a length that none of ours has.
    pub(crate) fn of_exporter(region_bytes: u64, chunk_bytes: u64) -> Result<Self> {
        if chunk_bytes == 0 || chunk_bytes > LONGEST || !chunk_bytes.is_multiple_of(GRANULE as u64) {
            return Err(Error::Protocol(format!("it copies in chunks of {chunk_bytes} bytes")));
        }
        Ok(Self { region_bytes, chunk_bytes })
    }

    pub(crate) const fn chunk_bytes(self) -> u64 {
        self.chunk_bytes
    }

    /// How many there are; at least one.
    pub(crate) const fn count(self) -> u64 {
        self.region_bytes.div_ceil(self.chunk_bytes)
    }

    /// Bytes of the shared memory.
    pub(crate) const fn buffer_bytes(self) -> usize {
        let halves = if self.count() > 1 { 2 } else { 1 };
        (self.chunk_bytes * halves) as usize
    }

    /// Where chunk `index`, one of these, begins in the shared memory.
    pub(crate) const fn place(self, index: u64) -> usize {
        ((index % 2) * self.chunk_bytes) as usize
    }

    /// Bytes of chunk `index`: the last may be shorter.
    pub(crate) const fn len(self, index: u64) -> u64 {
        let left = self.region_bytes - index * self.chunk_bytes;
        if left < self.chunk_bytes { left } else { self.chunk_bytes }
    }

    /// The part of a range as long as the region that chunk `index` is.
    pub(crate) fn part(self, index: u64, range: DeviceRange) -> Result<DeviceRange> {
        let part = range.slice(index * self.chunk_bytes, self.len(index));
        part.ok_or_else(|| {
            Error::InvalidRegion(format!("chunk {index} leaves a range of {} bytes", range.len))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::address::DevicePtr;
    use crate::model::device::DeviceOrdinal;

    const GRANULE: u64 = super::GRANULE as u64;

    #[test]
    fn chunks_cover_a_region_once_whatever_its_length() {
        for bytes in [1, 7, GRANULE - 1, GRANULE, GRANULE + 1, 2 * GRANULE, 5 * GRANULE + 3] {
            for wanted in [0, 1, GRANULE, GRANULE + 1, 3 * GRANULE, u64::MAX] {
                let chunks = Chunks::new(bytes, wanted);
                let range = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(1 << 40), bytes);
                let mut end = 0;
                for index in 0..chunks.count() {
                    let part = chunks.part(index, range).unwrap();
                    assert_eq!(part.ptr.get(), (1 << 40) + end, "{chunks:?}");
                    assert!(
                        part.len > 0 && chunks.place(index) as u64 + part.len <= chunks.buffer_bytes() as u64
                    );
                    end += part.len;
                }
                assert_eq!(end, bytes, "{chunks:?}");
                assert_eq!(Chunks::of_exporter(bytes, chunks.chunk_bytes()).unwrap(), chunks);
            }
        }
    }

    #[test]
    fn neighbours_lie_in_different_halves_and_a_single_chunk_has_no_second() {
        let many = Chunks::new(3 * GRANULE, GRANULE);
        assert_eq!((many.place(0), many.place(1), many.place(2)), (0, GRANULE as usize, 0));
        assert_eq!(Chunks::new(1, 8 << 20).buffer_bytes() as u64, GRANULE);
    }

    #[test]
    fn senseless_lengths_of_an_exporter_are_refused() {
        for chunk_bytes in [0, 1, GRANULE + 1, 2 << 30, u64::MAX] {
            assert!(matches!(Chunks::of_exporter(1, chunk_bytes), Err(Error::Protocol(_))), "{chunk_bytes}");
        }
    }
}
