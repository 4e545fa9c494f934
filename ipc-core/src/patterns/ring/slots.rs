//! The addresses of a ring's slots.

use crate::model::address::DeviceRange;
use crate::sharing::RuntimeRef;

/// The slots of a ring in this process's address space.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotRanges {
    range: DeviceRange,
    count: u32,
    bytes: u64,
}

impl SlotRanges {
    /// Divides a range into slots; `None` if they do not fit.
    pub(super) fn new(range: DeviceRange, count: u32, bytes: u64) -> Option<Self> {
        let needed = bytes.checked_mul(u64::from(count))?;
        (count > 0 && bytes > 0 && needed <= range.len && range.end().is_some()).then_some(Self {
            range,
            count,
            bytes,
        })
    }

    pub(super) const fn count(&self) -> u32 {
        self.count
    }

    /// Returns the size of a slot in bytes.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) const fn device(&self) -> crate::model::device::DeviceOrdinal {
        self.range.device
    }

    /// Returns the slot of a sequence.
    pub(super) fn of(&self, sequence: u64) -> DeviceRange {
        let offset = sequence % u64::from(self.count) * self.bytes;
        self.range.slice(offset, self.bytes).expect("`new` checked that the slots fit")
    }

    /// Returns the previous sequence in the same slot.
    pub(super) fn previous_in_slot(&self, sequence: u64) -> Option<u64> {
        sequence.checked_sub(u64::from(self.count))
    }
}

/// Counts a wait of the host for a publication or a release.
pub(super) fn count_host_wait(runtime: RuntimeRef) {
    if let Some(runtime) = runtime.here() {
        runtime.metrics.ring_host_waits_total.add(1);
    }
}

#[cfg(test)]
mod tests;
