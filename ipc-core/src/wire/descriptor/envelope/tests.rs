use super::*;
use crate::model::tensor::{Dtype, TensorLayout, TensorTable};
use crate::wire::descriptor::Descriptor;
use crate::wire::examples::{plain_descriptor, plain_ring, plain_tensors};

type Read = fn(&[u8]) -> Result<(), DescriptorError>;

/// An example of each form, and its reader.
fn forms() -> Vec<(&'static str, Vec<u8>, Read)> {
    let layout = TensorLayout::contiguous(Dtype::F32, [2, 3]).unwrap();
    let table = TensorTable::new([("a", 0, layout.clone()), ("b", 24, layout)]).unwrap();
    let descriptor: Read = |bytes| Descriptor::from_bytes(bytes).map(drop);
    vec![
        ("descriptor", plain_descriptor().to_bytes(), descriptor),
        ("ring", plain_ring().to_bytes(), descriptor),
        ("named tensors", plain_tensors().to_bytes(), descriptor),
        ("table", table.to_bytes(), |bytes| TensorTable::from_bytes(bytes).map(drop)),
    ]
}

#[test]
fn damaged_bit_is_reported_as_damage() {
    for (form, bytes, read) in forms() {
        assert_eq!(read(&bytes), Ok(()), "{form}");
        // Another magic number is another kind of bytes.
        for bit in 4 * 8..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read(&damaged), Err(DescriptorError::BadChecksum), "{form}, bit {bit}");
        }
    }
}

#[test]
fn damaged_length_is_reported_as_damage() {
    for (form, bytes, read) in forms() {
        for length in [0, 1, 12, bytes.len() - 1, bytes.len() + 1, 1_048_806, u32::MAX as usize] {
            let mut damaged = bytes.clone();
            damaged[8..12].copy_from_slice(&(length as u32).to_le_bytes());
            assert_eq!(read(&damaged), Err(DescriptorError::BadChecksum), "{form}, length {length}");
        }
    }
}

#[test]
fn truncated_bytes_are_reported_with_both_lengths() {
    for (form, bytes, read) in forms() {
        for len in 4..bytes.len() {
            let error = read(&bytes[..len]);
            let Err(DescriptorError::Truncated { found, expected }) = error else {
                panic!("{form}, {len} bytes: {error:?}");
            };
            assert!(found == len && (len < expected && expected <= bytes.len()), "{form}: {expected}");
        }
        let expected = bytes.len();
        let last = read(&bytes[..expected - 1]);
        assert_eq!(last, Err(DescriptorError::Truncated { found: expected - 1, expected }), "{form}");
    }
}

#[test]
fn bytes_behind_the_end_are_counted() {
    for (form, bytes, read) in forms() {
        for extra in [1, 4, 100] {
            let longer = [bytes.as_slice(), &vec![7; extra]].concat();
            assert_eq!(read(&longer), Err(DescriptorError::TrailingBytes { extra }), "{form}");
        }
    }
}

#[test]
fn size_is_limited_before_the_checksum() {
    for (form, bytes, read) in forms() {
        let found = MAX_DESCRIPTOR_BYTES + 1;
        let longer = [bytes.as_slice(), &vec![7; found - bytes.len()]].concat();
        assert_eq!(read(&longer), Err(DescriptorError::TooLarge { found }), "{form}");
    }
}

#[test]
fn length_that_contradicts_an_intact_form_is_refused() {
    for (form, bytes, read) in forms() {
        for length in [0, bytes.len() - 1, bytes.len() + 1] {
            let mut forged = bytes[..bytes.len() - CHECKSUM_BYTES].to_vec();
            forged[8..12].copy_from_slice(&(length as u32).to_le_bytes());
            close(&mut forged);
            let error = read(&forged);
            let refused = matches!(error, Err(DescriptorError::BadField { field: "length", .. }));
            assert!(refused, "{form}, length {length}: {error:?}");
        }
    }
}

#[test]
fn other_version_is_reported_where_its_bytes_are_intact() {
    for (form, bytes, read) in forms() {
        let mut other = bytes[..bytes.len() - CHECKSUM_BYTES].to_vec();
        other[4] += 1;
        close(&mut other);
        assert!(matches!(read(&other), Err(DescriptorError::Version { .. })), "{form}");
    }
}
