//! The slots of a ring, as its descriptor states them.

use serde::Serialize;

/// Each slot begins and ends at a multiple of this many bytes from the start of the ring, so that its elements have the
/// alignment of the ring.
pub(crate) const ALIGNMENT: u64 = 256;

/// Maximum number of slots of a ring.
pub const MAX_RING_SLOTS: u32 = 1 << 16;

/// The number and the size of a ring's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RingSlots {
    slots: u32,
    slot_bytes: u64,
}

impl RingSlots {
    /// Returns `None` if the slots do not lie in a region of `len` bytes.
    pub(crate) fn new(slots: u32, slot_bytes: u64, len: u64) -> Option<Self> {
        let needed = slot_bytes.checked_mul(u64::from(slots))?;
        let good = (1..=MAX_RING_SLOTS).contains(&slots)
            && slot_bytes > 0
            && slot_bytes.is_multiple_of(ALIGNMENT)
            && needed <= len;
        good.then_some(Self { slots, slot_bytes })
    }

    /// Returns the number of slots.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the size of each slot in bytes, a multiple of 256.
    pub const fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }
}
