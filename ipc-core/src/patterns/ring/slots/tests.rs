use super::*;
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;

fn range(len: u64) -> DeviceRange {
    DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(4096), len)
}

#[test]
fn sequences_cycle_through_slots() {
    let slots = SlotRanges::new(range(1000), 3, 256).unwrap();
    let begins: Vec<_> = (0..7).map(|sequence| slots.of(sequence).ptr.get() - 4096).collect();
    assert_eq!(begins, [0, 256, 512, 0, 256, 512, 0]);
    assert_eq!(slots.of(u64::MAX).len, 256);
    let before: Vec<_> = (0..5).map(|sequence| slots.previous_in_slot(sequence)).collect();
    assert_eq!(before, [None, None, None, Some(0), Some(1)]);
}

#[test]
fn slots_that_do_not_fit_are_rejected() {
    for (len, count, bytes) in
        [(767, 3, 256), (1000, 0, 256), (1000, 3, 0), (1000, u32::MAX, u64::MAX), (1000, 2, u64::MAX)]
    {
        assert!(SlotRanges::new(range(len), count, bytes).is_none(), "{len} {count} {bytes}");
    }
}
