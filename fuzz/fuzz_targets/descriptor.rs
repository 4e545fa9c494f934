//! Descriptors, tables of tensors and grants, in binary and as text, from any process.
#![no_main]

use device_ipc_core::limits::TEXT_PREFIX;
use device_ipc_core::{Descriptor, Grant, TensorTable};

fn read_binary(bytes: &[u8]) {
    if let Ok(read) = Descriptor::from_bytes(bytes) {
        let written = read.to_bytes();
        assert!(
            written.len() <= bytes.len(),
            "sections of a later version may be skipped, and none is added"
        );
        assert_eq!(Descriptor::from_bytes(&written).as_ref(), Ok(&read));
        assert_eq!(read.to_string().parse::<Descriptor>().expect("it was just written"), read);
        check(&read);
    }
    if let Ok(read) = TensorTable::from_bytes(bytes) {
        assert_eq!(TensorTable::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
        assert!(read.check_fits(read.region_bytes()).is_ok());
        assert!(read.iter().all(|(name, offset, layout)| read.get(name) == Some((offset, layout))));
    }
    if let Ok(read) = Grant::from_bytes(bytes) {
        assert_eq!(read.to_bytes(), bytes);
    }
}

fn read_text(text: &str) {
    if let Ok(read) = text.parse::<Grant>() {
        assert!(Grant::from_bytes(&read.to_bytes()).is_ok());
    }
    if let Ok(read) = text.parse::<Descriptor>() {
        assert_eq!(Descriptor::from_bytes(&read.to_bytes()).as_ref(), Ok(&read));
        check(&read);
    }
}

/// Calls the methods that an importer may call before it opens the descriptor.
fn check(read: &Descriptor) {
    if let Some(layout) = read.layout() {
        assert!(layout.check_fits(read.ring().map_or(read.len(), |ring| ring.slot_bytes())).is_ok());
    }
    if let Some(ring) = read.ring() {
        assert!(u128::from(ring.slots()) * u128::from(ring.slot_bytes()) <= u128::from(read.len()));
    }
    assert!(!read.is_empty() && read.allocations() >= read.homes().len());
    for (name, layout) in read.tensors() {
        assert_eq!(read.layout_of(name), Some(layout));
        assert!(read.home_of(name).is_some());
        let _ = (layout.elements(), layout.is_contiguous(), layout.start_bytes(), layout.span_bytes());
    }
    let _ = (format!("{read:?}"), read.view());
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    read_binary(bytes);
    // Arbitrary bytes rarely have a correct checksum.
    let mut repaired = bytes.to_vec();
    if let Some((covered, checksum)) = repaired.split_last_chunk_mut::<4>() {
        *checksum = crc32fast::hash(covered).to_le_bytes();
    }
    read_binary(&repaired);
    if let Ok(text) = str::from_utf8(bytes) {
        read_text(text);
        read_text(&format!("{TEXT_PREFIX}{text}"));
    }
});
