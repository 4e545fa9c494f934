use super::*;
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;

#[test]
fn overlapping_ranges_are_counted_once() {
    let range = |device, start, len| DeviceRange::new(DeviceOrdinal::new(device), DevicePtr::new(start), len);
    assert_eq!(bytes_of_all(vec![]), 0);
    let all = vec![range(0, 100, 50), range(0, 0, 20), range(0, 120, 10), range(0, 140, 20), range(1, 0, 20)];
    assert_eq!(bytes_of_all(all), 20 + 60 + 20);
}
