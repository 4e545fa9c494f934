use super::*;

fn range(ptr: u64, len: u64) -> DeviceRange {
    DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(ptr), len)
}

#[test]
fn ranges_at_the_end_of_the_address_space_do_not_wrap() {
    let last = range(u64::MAX - 15, 15);
    assert!(last.contains(&range(u64::MAX - 15, 1)));
    assert_eq!(range(u64::MAX - 3, 8).end(), None);
    assert!(!last.contains(&range(u64::MAX - 3, 8)));
    assert_eq!(range(16, 16).slice(u64::MAX, 2), None);
    assert_eq!(range(16, 16).slice(8, 9), None);
    assert_eq!(range(16, 16).slice(8, 8), Some(range(24, 8)));
}
