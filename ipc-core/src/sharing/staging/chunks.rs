//! The division of a copy into chunks, and the place of each chunk in the shared memory.

use crate::model::error::{Error, Result};
use crate::sharing::host_pages::GRANULE;

/// The longest chunk: an importer maps and pins two of what its exporter says.
const LONGEST: u64 = 64 << 20;

/// The bytes of a copy in chunks. Chunk `n` lies in half `n % 2` of the shared memory, which has only one half for a single
/// chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunks {
    copy_bytes: u64,
    chunk_bytes: u64,
}

impl Chunks {
    /// Divides at least one byte into chunks of about `wanted_bytes`, and no longer than necessary.
    pub(crate) fn new(copy_bytes: u64, wanted_bytes: u64) -> Self {
        let granule = GRANULE as u64;
        let whole = |bytes: u64| bytes.clamp(1, LONGEST).div_ceil(granule) * granule;
        Self { copy_bytes, chunk_bytes: whole(wanted_bytes).min(whole(copy_bytes)) }
    }

    /// Divides a copy into chunks of the length that an exporter states.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for a length that no exporter of this library uses.
    pub(crate) fn of_exporter(copy_bytes: u64, chunk_bytes: u64) -> Result<Self> {
        if chunk_bytes == 0 || chunk_bytes > LONGEST || !chunk_bytes.is_multiple_of(GRANULE as u64) {
            return Err(Error::Protocol(format!("it copies in chunks of {chunk_bytes} bytes")));
        }
        Ok(Self { copy_bytes, chunk_bytes })
    }

    pub(crate) const fn chunk_bytes(self) -> u64 {
        self.chunk_bytes
    }

    /// Returns their number, at least one.
    pub(crate) const fn count(self) -> u64 {
        self.copy_bytes.div_ceil(self.chunk_bytes)
    }

    /// Returns the length of the shared memory in bytes.
    pub(crate) const fn buffer_bytes(self) -> usize {
        let halves = if self.count() > 1 { 2 } else { 1 };
        (self.chunk_bytes * halves) as usize
    }

    /// Returns the offset of chunk `index` in the shared memory.
    pub(crate) const fn place(self, index: u64) -> usize {
        ((index % 2) * self.chunk_bytes) as usize
    }

    /// Returns the offset of chunk `index` in the copy.
    pub(crate) const fn start(self, index: u64) -> u64 {
        index * self.chunk_bytes
    }

    /// Returns the length of chunk `index` in bytes: the last may be shorter.
    pub(crate) const fn len(self, index: u64) -> u64 {
        let left = self.copy_bytes - self.start(index);
        if left < self.chunk_bytes { left } else { self.chunk_bytes }
    }
}

#[cfg(test)]
mod tests;
