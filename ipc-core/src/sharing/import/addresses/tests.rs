use super::*;
use crate::model::device::DeviceOrdinal;

fn range(ptr: u64, len: u64) -> DeviceRange {
    DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(ptr), len)
}

#[test]
fn ranges_with_a_common_byte_overlap() {
    let addresses = Addresses::default();
    assert!(!addresses.overlap(range(0x1000, 16)));
    addresses.add(range(0x1000, 0x1000));
    addresses.add(range(0x4000, 0x1000));
    for (ptr, len, expected) in [
        (0x0ff0, 0x10, false),
        (0x0ff0, 0x11, true),
        (0x1800, 1, true),
        (0x1fff, 1, true),
        (0x2000, 0x2000, false),
        (0x2000, 0x2001, true),
        (0x0, 0x10000, true),
        (0x5000, 1, false),
    ] {
        assert_eq!(addresses.overlap(range(ptr, len)), expected, "{len:#x} bytes at {ptr:#x}");
    }
}

#[test]
fn range_open_twice_stays_until_both_are_closed() {
    let addresses = Addresses::default();
    addresses.add(range(0x1000, 16));
    addresses.add(range(0x1000, 16));
    addresses.remove(range(0x1000, 16));
    assert!(addresses.overlap(range(0x1008, 1)));
    addresses.remove(range(0x1000, 16));
    addresses.remove(range(0x1000, 16));
    assert!(!addresses.overlap(range(0x1008, 1)));
}
