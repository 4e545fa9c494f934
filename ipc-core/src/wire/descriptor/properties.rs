//! Properties of all descriptors, tested with arbitrary descriptors.

use data_encoding::{BASE64, BASE64_NOPAD, BASE64URL_NOPAD, HEXLOWER, HEXUPPER};
use proptest::collection::vec;
use proptest::prelude::*;

use super::arbitrary::{descriptor, layout, tensors};
use super::*;
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::{Dtype, LayoutError, TensorTable};

/// Returns the bytes with a correct checksum.
fn repaired(mut bytes: Vec<u8>) -> Vec<u8> {
    let covered = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..covered]);
    bytes[covered..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The spellings of a secret's bytes.
pub(crate) fn spellings(secret: &[u8]) -> Vec<String> {
    let decimal: Vec<String> = secret.iter().map(u8::to_string).collect();
    let mut spellings = vec![HEXLOWER.encode(secret), HEXUPPER.encode(secret)];
    spellings.extend([BASE64.encode(secret), BASE64_NOPAD.encode(secret), BASE64URL_NOPAD.encode(secret)]);
    spellings.extend([decimal.join(","), decimal.join(", ")]);
    // In a longer Base64 text it begins at one of three offsets; the characters at its ends contain other bits too.
    for (before, first) in [(0, 0), (1, 2), (2, 3)] {
        let encoded = BASE64URL_NOPAD.encode(&[vec![0; before], secret.to_vec()].concat());
        spellings.push(encoded[first..encoded.len() - 1].to_owned());
    }
    spellings
}

/// Calls every method that an importer may call before it opens the descriptor.
fn show(read: &Descriptor) {
    let contents = read.contents();
    let shown = format!("{read:?}");
    let others = [
        data_encoding::HEXLOWER.encode(read.exporter().host.as_bytes()),
        data_encoding::HEXLOWER.encode(&read.exporter().boot),
        read.backend().to_owned(),
        contents.broker.to_string(),
    ];
    for part in contents.parts.iter() {
        let token = data_encoding::HEXLOWER.encode(&part.token.to_bytes());
        assert!(
            !shown.contains(&token) || others.iter().any(|other| other.contains(&token)),
            "the token is shown"
        );
    }
    if let Some(layout) = read.layout() {
        let room = read.ring().map_or(read.len(), |ring| ring.slot_bytes());
        assert!(layout.check_fits(room).is_ok());
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
    let _ = (contents.broker.to_socket_address(), read.view());
}

proptest! {
    // A failure prints its input; the checkout stays as it is.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn binary_form_round_trips(descriptor in descriptor()) {
        let bytes = descriptor.to_bytes();
        prop_assert!(bytes.len() <= MAX_DESCRIPTOR_BYTES);
        let read = Descriptor::from_bytes(&bytes).unwrap();
        prop_assert_eq!(&read, &descriptor);
        prop_assert_eq!(read.to_bytes(), bytes);
    }

    #[test]
    fn text_form_round_trips(descriptor in descriptor(), blanks in "[ \t\r\n]{0,3}") {
        let text = descriptor.to_string();
        prop_assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_:".contains(&byte)));
        prop_assert_eq!(&text.parse::<Descriptor>().unwrap(), &descriptor);
        prop_assert_eq!(format!("{blanks}{text}{blanks}").parse::<Descriptor>().unwrap(), descriptor);
    }

    #[test]
    fn serde_formats_give_it_back(descriptor in descriptor()) {
        let json = serde_json::to_string(&descriptor).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Descriptor>(&json).unwrap(), &descriptor);
        let packed = postcard::to_stdvec(&descriptor).unwrap();
        prop_assert_eq!(postcard::from_bytes::<Descriptor>(&packed).unwrap(), descriptor);
    }

    #[test]
    fn flipped_bit_is_detected(descriptor in descriptor()) {
        let mut bytes = descriptor.to_bytes();
        for bit in (0..bytes.len() * 8).step_by(1 + bytes.len() / 500) {
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Descriptor::from_bytes(&bytes).is_err(), "bit {}", bit);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn truncation_and_addition_are_detected(descriptor in descriptor(), more in vec(any::<u8>(), 1..9)) {
        let bytes = descriptor.to_bytes();
        for len in (0..bytes.len()).step_by(1 + bytes.len() / 500) {
            prop_assert!(Descriptor::from_bytes(&bytes[..len]).is_err(), "{} bytes", len);
        }
        prop_assert!(Descriptor::from_bytes(&[bytes, more].concat()).is_err());
        let text = descriptor.to_string();
        for len in (0..text.len()).step_by(1 + text.len() / 500) {
            prop_assert!(text[..len].parse::<Descriptor>().is_err(), "{} characters", len);
        }
    }

    /// The checksum is corrected, so that the checks after it are reached.
    #[test]
    fn damage_that_the_checksum_hides_is_refused_or_read_consistently(
        descriptor in descriptor(),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = descriptor.to_bytes();
        for (at, byte) in damage {
            let at = at.index(bytes.len() - 4);
            bytes[at] = byte;
        }
        if let Ok(read) = Descriptor::from_bytes(&repaired(bytes)) {
            show(&read);
            prop_assert_eq!(Descriptor::from_bytes(&read.to_bytes()).unwrap(), read);
        }
    }

    #[test]
    fn arbitrary_bytes_and_texts_do_not_panic(bytes in vec(any::<u8>(), 0..400), text in ".{0,200}") {
        prop_assert!(Descriptor::from_bytes(&bytes).is_err() && TensorTable::from_bytes(&bytes).is_err());
        let bytes = [b"DIPC\x01\x00".as_slice(), &bytes].concat();
        prop_assert!(Descriptor::from_bytes(&bytes).is_err() && TensorTable::from_bytes(&bytes).is_err());
        prop_assert!(text.parse::<Descriptor>().is_err());
        let prefixed = TEXT_PREFIX.to_owned() + &text;
        prop_assert!(prefixed.parse::<Descriptor>().is_err());
    }

    #[test]
    fn neither_the_view_nor_debug_shows_a_token(descriptor in descriptor()) {
        let json = serde_json::to_string(&descriptor.view()).unwrap();
        let debug = format!("{descriptor:?} {descriptor:#?}");
        for part in descriptor.contents().parts.iter() {
            for spelling in spellings(&part.token.to_bytes()) {
                prop_assert!(!json.contains(&spelling) && !debug.contains(&spelling), "{spelling} is shown");
            }
        }
    }

    #[test]
    fn table_round_trips_and_finds_its_tensors(tensors in tensors()) {
        let table = TensorTable::new(tensors.clone()).unwrap();
        let bytes = table.to_bytes();
        let read = TensorTable::from_bytes(&bytes).unwrap();
        prop_assert_eq!(&read, &table);
        for len in (0..bytes.len()).step_by(1 + bytes.len() / 200) {
            prop_assert!(TensorTable::from_bytes(&bytes[..len]).is_err());
        }
        for ((name, offset, layout), listed) in tensors.iter().zip(read.iter()) {
            prop_assert_eq!(read.get(name), Some((*offset, layout)));
            prop_assert_eq!(listed, (name.as_str(), *offset, layout));
        }
        prop_assert_eq!(read.get("unknown name"), None);
        prop_assert!(table.check_fits(table.region_bytes()).is_ok());
        prop_assert!(table.region_bytes() == 0 || table.check_fits(table.region_bytes() - 1).is_err());
    }

    #[test]
    fn damaged_tables_are_refused_or_read_consistently(
        tensors in tensors(),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = TensorTable::new(tensors).unwrap().to_bytes();
        for (at, byte) in damage {
            let at = at.index(bytes.len() - 4);
            bytes[at] = byte;
        }
        if let Ok(read) = TensorTable::from_bytes(&repaired(bytes)) {
            prop_assert!(read.check_fits(read.region_bytes()).is_ok());
            prop_assert_eq!(TensorTable::from_bytes(&read.to_bytes()).unwrap(), read);
        }
    }

    #[test]
    fn packed_tensors_are_aligned_and_adjacent(layouts in vec(layout(), 0..20), power in 0_u32..12) {
        let align = 1_u64 << power;
        let named = layouts.iter().cloned().enumerate().map(|(index, layout)| (index.to_string(), layout));
        let table = TensorTable::packed(align, named).unwrap();
        let mut end = 0;
        for ((_, offset, layout), given) in table.iter().zip(&layouts) {
            prop_assert_eq!(layout, given);
            prop_assert!(offset >= end && offset - end < align && offset.is_multiple_of(align));
            end = offset + layout.span_bytes();
        }
        prop_assert_eq!(table.region_bytes(), table.iter().map(|(_, at, layout)| at + layout.span_bytes()).max().unwrap_or(0));
    }
}

fn bytes(elements: u64) -> TensorLayout {
    TensorLayout::contiguous(Dtype::U8, [elements]).unwrap()
}

#[test]
fn names_are_unique_and_have_1_to_1024_bytes() {
    let named = |names: &[&str]| {
        let tensors = names.iter().map(|name| (*name, 0, bytes(1)));
        TensorTable::new(tensors).map(|table| table.len()).map_err(|error| error.to_string())
    };
    assert_eq!(named(&["a", "b", "aa"]), Ok(3));
    assert!(named(&["a", "b", "a"]).unwrap_err().contains("\"a\": another tensor has this name"));
    assert!(named(&[""]).unwrap_err().contains("at least one byte"));
    assert_eq!(named(&[&"x".repeat(1024)]), Ok(1));
    let refused = named(&[&"x".repeat(1025)]).unwrap_err();
    assert!(refused.contains("at most 1024") && refused.len() < 200, "{refused}");
}

#[test]
fn table_that_does_not_fit_names_the_tensor() {
    let table = TensorTable::packed(16, [("first", bytes(3)), ("second", bytes(5))]).unwrap();
    assert_eq!(table.get("second").map(|(offset, _)| offset), Some(16));
    assert_eq!((table.region_bytes(), table.len(), table.is_empty()), (21, 2, false));
    let refused = table.check_fits(20).unwrap_err().to_string();
    assert!(refused.contains("\"second\"") && refused.contains("21 bytes"), "{refused}");
    assert!(TensorTable::packed(12, [("a", bytes(1))]).is_err(), "12 is no power of two");
    assert!(
        TensorTable::packed(1, [("a", bytes(u64::MAX)), ("b", bytes(1))]).is_err(),
        "the end does not fit"
    );
    assert!(
        TensorTable::packed(2, [("a", bytes(u64::MAX)), ("b", bytes(0))]).is_err(),
        "nor does the next place"
    );
}

#[test]
fn tensor_beyond_its_memory_is_named() {
    let plain = crate::wire::examples::plain_tensors();
    let of = |offset, layout: TensorLayout| {
        let tensors = crate::wire::examples::listed([("w", offset, layout)], vec![0]);
        let changed = plain.with(|contents| contents.memory = Memory::Tensors(tensors));
        Descriptor::from_bytes(&changed.to_bytes()).map(|_| ())
    };
    let size = 1 << 20;
    assert_eq!(of(size - 4, bytes(4)), Ok(()));
    assert_eq!(of(size, bytes(0)), Ok(()));
    let too_large = |needed| {
        let cause = LayoutError::TooLarge { needed, region: size };
        Err(DescriptorError::Tensor { name: "w".into(), cause })
    };
    assert_eq!(of(size - 3, bytes(4)), too_large(size + 1));
    assert_eq!(of(size + 1, bytes(0)), too_large(size + 1));
    assert_eq!(of(0, bytes(1).with_element_offset(size).unwrap()), too_large(size + 1));
}

/// Returns the error of the descriptor with this change, or an empty text if it is accepted.
fn refused(plain: &Descriptor, change: impl FnOnce(&mut Contents)) -> String {
    let read = Descriptor::from_bytes(&plain.with(change).to_bytes());
    read.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn senseless_named_tensors_are_refused() {
    let plain = crate::wire::examples::plain_tensors();
    assert_eq!(refused(&plain, |_| {}), "");
    let refused = |change: &dyn Fn(&mut Contents)| refused(&plain, change);
    assert!(refused(&|one| one.parts = OneOrMany::NONE).contains("region"), "without regions");
    let with_regions = |regions: Vec<Vec<DescribedExtent>>| {
        refused(&|one| {
            one.parts[0].regions = PartRegions::Many(Arc::new(regions.iter().cloned().collect()));
        })
    };
    let extent = DescribedExtent { size: 1, generation: 0 };
    assert!(with_regions(vec![]).contains("a device has none"));
    assert!(with_regions(vec![vec![]]).contains("allocations"));
    assert!(with_regions(vec![vec![DescribedExtent { size: 0, ..extent }]]).contains("one has no bytes"));
    assert!(refused(&|one| one.parts[1].export = one.parts[0].export).contains("the same export"));
    let listed = |table: TensorTable, regions| {
        refused(&|one| {
            one.memory = Memory::Tensors(Arc::new(Tensors::new(table.clone(), Vec::clone(&regions))))
        })
    };
    let table = plain.contents().table().unwrap();
    assert!(listed(table.clone(), vec![99, 1, 2]).contains("region 99"));
    assert!(listed(TensorTable::default(), vec![]).contains("there are none"));
    let huge = DescribedExtent { size: u64::MAX, generation: 0 };
    assert!(with_regions(vec![vec![huge; 2]]).contains("64 bits"));
    assert!(with_regions(vec![vec![extent; 2048]; 33]).contains("more than 65536"));
    assert!(refused(&|one| one.ring = RingSlots::new(1, 256, 256)).contains("a ring lies in a region"));
    let many = refused(&|one| one.parts = vec![one.parts[0].clone(); 65].into_iter().collect());
    assert!(many.contains("more than 64 devices"), "{many}");
}

#[test]
fn senseless_regions_are_refused() {
    let plain = crate::wire::examples::plain_descriptor();
    let region = |offset, len| {
        let memory = Memory::Region(DescribedRegion { offset, len, layout: None });
        refused(&plain, |one| one.memory = memory)
    };
    assert_eq!(region(0, 1 << 20), "");
    for (offset, len) in [(0, 0), (1, 1 << 20), (1 << 20, 1), (u64::MAX, 2)] {
        assert!(region(offset, len).contains("invalid descriptor: region"), "{len} B at {offset}");
    }
    let ring = crate::wire::examples::plain_ring();
    let with_slots_of = |bytes: u64| {
        refused(&ring, |one| {
            let Memory::Region(region) = &mut one.memory else { panic!("a ring lies in a region") };
            region.layout = Some(TensorLayout::contiguous(Dtype::U8, [bytes]).unwrap());
        })
    };
    assert_eq!(with_slots_of(1280), "");
    assert!(with_slots_of(1281).contains("1281"), "{}", with_slots_of(1281));
    let second = plain.contents().parts[0].clone();
    let several = refused(&plain, |one| {
        one.parts.push(Part { export: ExportId(9), ..second });
    });
    assert!(several.contains("several devices"), "{several}");
}

/// Returns the bytes of a descriptor with these sections.
fn with_sections(sections: &[u8]) -> Vec<u8> {
    let mut bytes = crate::wire::examples::plain_descriptor().to_bytes();
    bytes.truncate(12);
    bytes.extend_from_slice(sections);
    let total = (bytes.len() + 4) as u32;
    bytes[8..12].copy_from_slice(&total.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    repaired(bytes)
}

fn sections(descriptor: &Descriptor) -> Vec<u8> {
    let bytes = descriptor.to_bytes();
    bytes[12..bytes.len() - 4].to_vec()
}

/// An unknown section of five bytes.
fn unknown(kind: u16, flags: u16) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &flags.to_le_bytes(), &5_u32.to_le_bytes(), b"later"].concat()
}

#[test]
fn unknown_section_is_skipped_unless_it_is_critical() {
    for plain in [crate::wire::examples::plain_descriptor(), crate::wire::examples::plain_tensors()] {
        let known = sections(&plain);
        for kind in [0, 8, 99] {
            for at in [0, known.len()] {
                let with = |flags| {
                    let all = [&known[..at], &unknown(kind, flags), &known[at..]].concat();
                    Descriptor::from_bytes(&with_sections(&all))
                };
                assert_eq!(with(0), Ok(plain.clone()), "kind {kind}");
                assert_eq!(with(1), Err(DescriptorError::UnknownSection { kind }));
            }
        }
    }
    let table = TensorTable::new([("w", 0, bytes(1))]).unwrap();
    let known = table.to_bytes()[12..].to_vec();
    let known = &known[..known.len() - 4];
    let with = |flags| TensorTable::from_bytes(&with_sections(&[known, &unknown(99, flags)].concat()));
    assert_eq!(with(0), Ok(table));
    assert_eq!(with(1), Err(DescriptorError::UnknownSection { kind: 99 }));
}

#[test]
fn sections_that_are_missing_repeated_or_out_of_order_are_refused() {
    let plain = crate::wire::examples::plain_descriptor().with(|contents| {
        let layout = Some(bytes(4));
        contents.memory = Memory::Region(DescribedRegion { offset: 0, len: 4096, layout });
        contents.ring = RingSlots::new(1, 256, 4096);
    });
    let mut rest = sections(&plain);
    let mut each = Vec::new();
    while !rest.is_empty() {
        let len = 8 + u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
        each.push(rest.drain(..len).collect::<Vec<_>>());
    }
    assert_eq!(each.len(), 5);
    assert_eq!(Descriptor::from_bytes(&with_sections(&each.concat())), Ok(plain));
    for missing in 0..3 {
        let mut some = each.clone();
        some.remove(missing);
        assert!(Descriptor::from_bytes(&with_sections(&some.concat())).is_err(), "without {missing}");
    }
    for at in 0..each.len() {
        let mut twice = each.clone();
        twice.insert(at, each[at].clone());
        assert!(Descriptor::from_bytes(&with_sections(&twice.concat())).is_err(), "twice {at}");
        let mut swapped = each.clone();
        swapped.swap(at, (at + 1) % each.len());
        assert!(Descriptor::from_bytes(&with_sections(&swapped.concat())).is_err(), "{at} swapped");
        let mut longer = each.clone();
        let grown = (longer[at].len() - 7) as u32;
        longer[at][4..8].copy_from_slice(&grown.to_le_bytes());
        longer[at].push(0);
        assert!(Descriptor::from_bytes(&with_sections(&longer.concat())).is_err(), "{at} longer");
        let mut lying = each.clone();
        lying[at][4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Descriptor::from_bytes(&with_sections(&lying.concat())).is_err(), "{at} lies");
    }
}

#[test]
fn table_and_descriptor_are_told_apart() {
    let table = TensorTable::new([("w", 0, bytes(1))]).unwrap();
    assert!(Descriptor::from_bytes(&table.to_bytes()).is_err());
    let named = crate::wire::examples::plain_tensors();
    assert!(
        TensorTable::from_bytes(&named.to_bytes())
            .unwrap_err()
            .to_string()
            .contains("a table of tensors alone")
    );
    let damaged = |at: usize, byte: u8| {
        let mut changed = named.to_bytes();
        changed[at] = byte;
        Descriptor::from_bytes(&repaired(changed)).unwrap_err().to_string()
    };
    assert!(damaged(4, 2).contains("the descriptor has format 2.0") && damaged(4, 2).contains("receiving"));
    assert!(damaged(6, 0x80).contains("features"), "a flag that this version does not know");
    assert!(damaged(0, b'X').contains("not a device-ipc descriptor"));
    let text = "dipc.AAAA".parse::<Descriptor>().unwrap_err().to_string();
    assert!(text.contains(TEXT_PREFIX), "{text}");
}

#[test]
fn slots_that_do_not_fit_are_refused() {
    for (slots, each, len) in [(1, 4096, 4096), (16, 256, 4096), (3, 1280, 4096)] {
        assert!(RingSlots::new(slots, each, len).is_some());
    }
    for (slots, each) in
        [(0, 256), (17, 256), (3, 0), (3, 255), (1, 4352), (1 << 17, 256), (2, u64::MAX), (2, 1 << 63)]
    {
        assert_eq!(RingSlots::new(slots, each, 4096), None, "{slots} of {each}");
        let mut forged = crate::wire::examples::plain_ring().to_bytes();
        let at = forged.len() - 4 - 12;
        forged[at..at + 4].copy_from_slice(&u32::to_le_bytes(slots));
        forged[at + 4..at + 12].copy_from_slice(&u64::to_le_bytes(each));
        let read = Descriptor::from_bytes(&repaired(forged));
        assert!(matches!(read, Err(DescriptorError::BadField { field: "slots", .. })), "{slots} of {each}");
    }
}

#[test]
fn spellings_of_a_secret_are_found() {
    let secret: [u8; 16] = std::array::from_fn(|index| index as u8 * 13 + 7);
    let found = |shown: &str| spellings(&secret).iter().any(|spelling| shown.contains(spelling));
    for before in 0..4 {
        let around = [vec![b'x'; before], secret.to_vec(), b"more".to_vec()].concat();
        assert!(found(&BASE64URL_NOPAD.encode(&around)), "{before} bytes before it");
        assert!(found(&HEXLOWER.encode(&around)));
    }
    assert!(found(&format!("{secret:?}")));
    assert!(!found("Token(not shown)"));
}
