use super::*;
use crate::model::address::DevicePtr;

fn range(address: u64, len: u64) -> DeviceRange {
    DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(address), len)
}

const fn span(region: u32, offset: u64, len: u64) -> Span {
    Span { region, offset, len }
}

fn regions() -> [DeviceRange; 2] {
    [range(0x1000, 100), range(0x8000, 50)]
}

#[test]
fn parts_of_a_copy_cover_every_range_once() {
    let ranges = [range(0x1000, 7), range(0x3000, 1), range(0x2000, 20)];
    let segments = Segments::new(ranges.to_vec()).unwrap();
    for step in 1..=segments.len() {
        let mut found = Vec::new();
        let mut start = 0;
        while start < segments.len() {
            let len = step.min(segments.len() - start);
            let mut at = 0;
            for (offset, part) in segments.within(start, len) {
                assert_eq!(offset, at, "no gap in the copy");
                at += part.len;
                found.extend((0..part.len).map(|byte| part.ptr.get() + byte));
            }
            assert_eq!(at, len);
            start += len;
        }
        let all = ranges.iter().flat_map(|range| (0..range.len).map(|byte| range.ptr.get() + byte));
        assert_eq!(found, all.collect::<Vec<_>>(), "parts of {step} bytes");
    }
}

#[test]
fn spans_in_order_are_the_requested_memory() {
    let all = Segments::requested(&regions(), &[]).unwrap();
    assert_eq!(all.ranges(), regions());
    let spans = [span(0, 10, 20), span(0, 30, 70), span(1, 0, 50)];
    let found = Segments::requested(&regions(), &spans).unwrap();
    assert_eq!(found.ranges(), [range(0x100a, 20), range(0x101e, 70), range(0x8000, 50)]);
    assert_eq!(found.len(), 140);
}

#[test]
fn spans_that_no_importer_needs_are_refused() {
    for (spans, why) in [
        (&[span(2, 0, 1)][..], "does not exist: the export has 2 regions"),
        (&[span(u32::MAX, 0, 1)], "does not exist"),
        (&[span(0, 0, 101)], "exceeds the region of 100 B"),
        (&[span(1, 50, 1)], "exceeds the region of 50 B"),
        (&[span(0, u64::MAX, u64::MAX)], "exceeds the region"),
        (&[span(0, 5, 0)], "has no bytes"),
        (&[span(0, 0, 10), span(0, 9, 1)], "begins before the end of the span before it"),
        (&[span(0, 0, 10), span(0, 0, 10)], "begins before the end"),
        (&[span(1, 0, 10), span(0, 0, 10)], "begins before the end"),
    ] {
        let refused = Segments::requested(&regions(), spans).unwrap_err();
        assert!(refused.contains(why), "{spans:?}: {refused}");
    }
    assert!(Segments::requested(&[], &[]).is_err());
}
