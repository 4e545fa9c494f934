use super::*;

const GRANULE: u64 = super::GRANULE as u64;

#[test]
fn chunks_cover_a_copy_once_whatever_its_length() {
    for bytes in [1, 7, GRANULE - 1, GRANULE, GRANULE + 1, 2 * GRANULE, 5 * GRANULE + 3] {
        for wanted in [0, 1, GRANULE, GRANULE + 1, 3 * GRANULE, u64::MAX] {
            let chunks = Chunks::new(bytes, wanted);
            let mut end = 0;
            for index in 0..chunks.count() {
                let len = chunks.len(index);
                assert_eq!(chunks.start(index), end, "{chunks:?}");
                assert!(len > 0 && chunks.place(index) as u64 + len <= chunks.buffer_bytes() as u64);
                end += len;
            }
            assert_eq!(end, bytes, "{chunks:?}");
            assert_eq!(Chunks::of_exporter(bytes, chunks.chunk_bytes()).unwrap(), chunks);
        }
    }
}

#[test]
fn neighbours_lie_in_different_halves_and_a_single_chunk_has_no_second() {
    let many = Chunks::new(3 * GRANULE, GRANULE);
    assert_eq!((many.place(0), many.place(1), many.place(2)), (0, GRANULE as usize, 0));
    assert_eq!(Chunks::new(1, 8 << 20).buffer_bytes() as u64, GRANULE);
}

#[test]
fn senseless_lengths_of_an_exporter_are_refused() {
    for chunk_bytes in [0, 1, GRANULE + 1, 2 << 30, u64::MAX] {
        assert!(matches!(Chunks::of_exporter(1, chunk_bytes), Err(Error::Protocol(_))), "{chunk_bytes}");
    }
}
