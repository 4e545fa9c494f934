use proptest::prelude::*;

use super::*;

fn grant(parts: &[(u64, [u8; 16])]) -> Grant {
    let exporter = GrantExporter { pid: 1, start_time: u64::MAX, pid_namespace: 3 };
    let part = |(export, token): &(u64, [u8; 16])| (ExportId(*export), Token::from_bytes(*token));
    Grant { exporter, parts: parts.iter().map(part).collect() }
}

proptest! {
    #[test]
    fn grant_survives_its_bytes(parts in prop::collection::vec(any::<(u64, [u8; 16])>(), 1..=MAX_REGIONS_SECTIONS)) {
        let written = grant(&parts);
        let bytes = written.to_bytes();
        prop_assert_eq!(bytes.len(), 32 + 24 * parts.len());
        prop_assert_eq!(&Grant::from_bytes(&bytes).expect("it was just written"), &written);
        let text = written.to_string();
        prop_assert_eq!(&text.parse::<Grant>().expect("it was just written"), &written);
        let wrapped: String = text.chars().enumerate().flat_map(|(at, one)| (at % 60 == 59).then_some('\n').into_iter().chain([one])).collect();
        prop_assert_eq!(format!("'{wrapped}'").parse::<Grant>().expect("it was wrapped"), written);
    }

    #[test]
    fn changed_or_truncated_bytes_are_rejected(at in 0_usize..56, bit in 0_u8..8) {
        let bytes = grant(&[(7, [9; 16])]).to_bytes();
        let mut changed = bytes.clone();
        changed[at] ^= 1 << bit;
        prop_assert!(Grant::from_bytes(&changed).is_err());
        prop_assert!(Grant::from_bytes(&bytes[..at]).is_err());
        let text = grant(&[(7, [9; 16])]).to_string();
        prop_assert!(text[..at].parse::<Grant>().is_err());
    }

    #[test]
    fn bytes_of_a_right_checksum_are_read_or_rejected(covered in prop::collection::vec(any::<u8>(), 0..120)) {
        for covered in [covered.clone(), [&MAGIC[..], &covered].concat(), [&MAGIC[..], &[VERSION], &covered].concat()] {
            let bytes = [&covered[..], &crc32fast::hash(&covered).to_le_bytes()].concat();
            if let Ok(read) = Grant::from_bytes(&bytes) {
                prop_assert_eq!(read.to_bytes(), bytes);
            }
        }
    }
}

#[test]
fn debug_of_a_grant_does_not_show_its_token() {
    assert_eq!(format!("{:?}", grant(&[(7, [1; 16])])), format!("{:?}", grant(&[(7, [2; 16])])));
}

#[test]
fn text_of_a_descriptor_is_no_grant() {
    let text = grant(&[(7, [1; 16])]).to_string();
    assert!(text.starts_with("dipcg1:") && text.len() < 90, "{text}");
    let error = |text: &str| text.parse::<Grant>().unwrap_err().to_string();
    assert!(error("dipc1:AAAA").contains("not a device-ipc grant"), "{}", error("dipc1:AAAA"));
    assert!(error(&text[..40]).contains("damaged or cut off"), "{}", error(&text[..40]));
    let descriptor = text.parse::<crate::Descriptor>().unwrap_err().to_string();
    assert!(
        descriptor.contains("not a device-ipc descriptor") && descriptor.contains("dipcg1:"),
        "{descriptor}"
    );
}
