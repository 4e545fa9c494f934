use super::*;
use crate::model::device::DeviceOrdinal;

const fn range(len: u64) -> DeviceRange {
    DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(1 << 20), len)
}

/// Checks copies between tensors of 64 bytes in blocks of 8, which lie at these distances.
fn check(dst_stride: u64, src_stride: u64, sources: &[u32], destinations: &[u32]) -> Result<(), String> {
    let tensor = BlockedTensors { dst: range(64), dst_stride, src: range(64), src_stride };
    check_blocks(&[tensor], 8, sources, destinations).map_err(|error| error.to_string())
}

fn refused(result: Result<(), String>, phrase: &str) {
    let text = result.expect_err(phrase);
    assert!(text.contains(phrase), "{text}");
}

#[test]
fn overlapping_destination_blocks_are_refused() {
    assert_eq!(check(8, 8, &[0, 1], &[6, 7]), Ok(()));
    assert_eq!(check(9, 16, &[0, 3], &[0, 6]), Ok(()), "there are gaps between blocks");
    assert_eq!(check(8, 7, &[0, 1], &[0, 1]), Ok(()), "sources may overlap");
    assert_eq!(check(7, 8, &[1], &[1]), Ok(()), "a single block overlaps no other");
    refused(check(7, 8, &[0, 1], &[0, 1]), "destination blocks of tensor 0 overlap");
    refused(check(8, 8, &[0, 1, 2], &[3, 5, 3]), "block 3 is named as a destination twice");
    assert_eq!(check(8, 8, &[3, 3], &[0, 1]), Ok(()), "a source may be copied twice");
}

#[test]
fn blocks_outside_a_tensor_are_refused() {
    assert_eq!(check(8, 28, &[2], &[7]), Ok(()), "the last one ends with the tensor");
    refused(check(8, 29, &[2], &[7]), "source block 2 of tensor 0");
    refused(check(8, 8, &[7], &[8]), "destination block 8 of tensor 0");
    refused(check(u64::MAX, 8, &[7], &[2]), "destination block 2 of tensor 0");
}

#[test]
fn unequal_numbers_and_empty_blocks_are_refused() {
    refused(check(8, 8, &[1], &[1, 2]), "1 source blocks and 2 destination blocks");
    let none = check_blocks(&[], 0, &[0], &[0]).map_err(|error| error.to_string());
    refused(none, "blocks of 0 bytes");
    assert!(check_blocks(&[], 0, &[], &[]).is_ok());
}
