use super::*;
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;
use crate::model::tensor::{Dtype, TensorLayout};
use crate::wire::descriptor::{DescribedExtent, Memory, PartRegions};
use crate::wire::examples::{listed, plain_tensors};

const fn span(region: u32, offset: u64, len: u64) -> Span {
    Span { region, offset, len }
}

fn merged(spans: &[Span], widest: u64) -> Vec<Span> {
    let mut spans = spans.to_vec();
    merge(&mut spans, widest);
    spans
}

#[test]
fn overlapping_spans_merge_and_others_do_not() {
    let spans =
        [span(0, 0, 10), span(0, 5, 10), span(0, 7, 2), span(0, 15, 1), span(0, 17, 1), span(1, 0, 5)];
    assert_eq!(merged(&spans, 0), [span(0, 0, 16), span(0, 17, 1), span(1, 0, 5)]);
    assert_eq!(merged(&spans, 1), [span(0, 0, 18), span(1, 0, 5)]);
}

#[test]
fn surplus_spans_close_the_smallest_gaps() {
    let spans = [span(0, 0, 1), span(0, 11, 1), span(0, 13, 1), span(1, 0, 1), span(1, 4, 1)];
    assert_eq!(widest_gap_to_close(&spans, 5), None);
    assert_eq!(widest_gap_to_close(&spans, 4), Some(1));
    assert_eq!(widest_gap_to_close(&spans, 3), Some(3));
    assert_eq!(merged(&spans, 3), [span(0, 0, 1), span(0, 11, 3), span(1, 0, 5)]);
    assert_eq!(widest_gap_to_close(&spans, 1), None, "two regions are two spans at least");
}

#[test]
fn spans_keep_their_alignment_and_are_found_again() {
    let spans = vec![span(0, 100, 1000), span(0, 5000, 8), span(3, 0, 512)];
    let layout = CopyLayout::placed(spans.clone(), false).unwrap();
    assert_eq!(layout.bytes(), 1520);
    let buffer = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(1 << 30), layout.buffer_bytes());
    let segments = layout.segments(buffer).unwrap();
    let mut last = buffer.ptr.get();
    for (span, range) in spans.iter().zip(segments.ranges()) {
        assert_eq!(range.ptr.get() % ALIGNMENT, span.offset % ALIGNMENT);
        assert!(range.ptr.get() >= last && range.len == span.len, "they do not overlap");
        last = range.ptr.get() + range.len;
        let at = range.ptr.get() - buffer.ptr.get();
        assert_eq!(layout.find(span.region, span.offset + 3, span.len - 3), Some(at + 3));
        assert_eq!(layout.find(span.region, span.offset, span.len + 1), None);
    }
    assert_eq!(layout.find(1, 100, 1), None);
    assert_eq!(layout.find(0, 99, 1), None);
}

#[test]
fn spans_of_more_bytes_than_addresses_are_refused() {
    let spans = vec![span(0, 0, u64::MAX - 5), span(1, 0, u64::MAX - 5)];
    assert!(matches!(CopyLayout::placed(spans, true), Err(Error::InvalidRegion(_))));
}

#[test]
fn copy_of_tensors_requests_their_bytes_only() {
    let descriptor = plain_tensors();
    let requested = |part| CopyLayout::of_tensors(descriptor.contents(), part).unwrap().requested().to_vec();
    assert_eq!(requested(0), [span(0, 256, 128 * 64 * 2), span(1, 0, 64 * 4)]);
    assert_eq!(requested(1), [span(0, (1 << 20) - 512, 4096)]);
}

#[test]
fn copy_of_more_regions_than_spans_requests_them_whole() {
    let layout_of = |regions: u32| {
        let byte = TensorLayout::contiguous(Dtype::U8, [1]).unwrap();
        let tensors = (0..regions).map(|region| (region.to_string(), 8, byte.clone()));
        let extent = || std::iter::once(DescribedExtent { size: 4096, generation: 0 });
        let descriptor = plain_tensors().with(|contents| {
            contents.memory = Memory::Tensors(listed(tensors, (0..regions).collect()));
            contents.parts = std::iter::once(contents.first().clone()).collect();
            let regions = (0..regions).map(|_| extent()).collect();
            contents.parts[0].regions = PartRegions::Many(std::sync::Arc::new(regions));
        });
        CopyLayout::of_tensors(descriptor.contents(), 0).unwrap()
    };
    let most = layout_of(MAX_SPANS as u32);
    assert_eq!((most.requested().len(), most.bytes()), (MAX_SPANS, MAX_SPANS as u64));
    let more = layout_of(MAX_SPANS as u32 + 1);
    assert_eq!((more.requested().len(), more.bytes()), (0, (MAX_SPANS as u64 + 1) * 4096));
}
