//! What holds for every bundle and every table of tensors, tried on arbitrary ones.

use std::sync::Arc;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::backend::Access;
use crate::model::tensor::{Dtype, LayoutError, TensorLayout, TensorTable};
use crate::wire::Token;
use crate::wire::descriptor::properties::{broker, home, identity, layout, spellings};
use crate::wire::descriptor::{DescribedExtent, DescribedRegions, DescriptorError, ExportId};

fn part() -> impl Strategy<Value = Part> {
    let extent = (1_u64..1 << 40, any::<u64>());
    let extent = extent.prop_map(|(size, generation)| DescribedExtent { size, generation });
    let regions = vec(vec(extent, 1..=3), 1..=4);
    let regions = regions.prop_map(|regions| Arc::new(regions.into_iter().collect::<DescribedRegions>()));
    (home(), any::<([u8; 16], bool)>(), regions).prop_map(|(home, (token, ready), regions)| Part {
        home,
        export: ExportId(0),
        token: Token::from_bytes(token),
        ready,
        regions,
    })
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![9 => "[a-z.0-9]{1,12}", 1 => ".{1,40}", 1 => Just("ü".repeat(512))]
}

fn contents() -> impl Strategy<Value = Contents> {
    let tensors = btree_map(name(), (any::<(Index, u64)>(), layout()), 1..=12);
    let given = ("[A-Za-z0-9_-]{1,32}", identity(), broker(), any::<(u64, bool)>());
    (given, vec(part(), 1..=3), tensors).prop_map(
        |((backend, exporter, broker, (first, writable)), mut parts, named)| {
            for (index, part) in parts.iter_mut().enumerate() {
                part.export = ExportId(first.wrapping_add(index as u64));
            }
            let bytes: Vec<u64> = parts
                .iter()
                .flat_map(|part| part.regions.iter())
                .map(|region| region.iter().map(|extent| extent.size).sum())
                .collect();
            let mut regions = Vec::new();
            let mut tensors = Vec::new();
            for (name, ((region, at), layout)) in named {
                let region = region.index(bytes.len());
                // One that does not fit is made a scalar of one byte.
                let fits = layout.span_bytes().is_ok_and(|span| span <= bytes[region]);
                let layout = if fits { layout } else { TensorLayout::contiguous(Dtype::U8, []).unwrap() };
                let room = bytes[region] - layout.span_bytes().unwrap();
                tensors.push((name, at.checked_rem(room + 1).unwrap(), layout));
                regions.push(region as u32);
            }
            let tensors = Arc::new(Tensors::new(TensorTable::new(tensors).unwrap(), regions));
            let access = if writable { Access::ReadWrite } else { Access::ReadOnly };
            Contents { backend, exporter, broker, access, parts, tensors }
        },
    )
}

fn bundle() -> impl Strategy<Value = BundleDescriptor> {
    contents().prop_map(BundleDescriptor::new)
}

fn tensors() -> impl Strategy<Value = Vec<(String, u64, TensorLayout)>> {
    btree_map(name(), (0_u64..1 << 40, layout()), 0..=12)
        .prop_map(|named| named.into_iter().map(|(name, (offset, layout))| (name, offset, layout)).collect())
}

/// With the checksum set right again.
fn repaired(mut bytes: Vec<u8>) -> Vec<u8> {
    let covered = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..covered]);
    bytes[covered..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

proptest! {
    // A failure prints its input; the checkout stays as it is.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_bundle_is_read_back_in_all_its_forms(bundle in bundle(), blanks in "[ \t\n]{0,3}") {
        let bytes = bundle.to_bytes();
        let read = BundleDescriptor::from_bytes(&bytes).unwrap();
        prop_assert_eq!(&read, &bundle);
        prop_assert_eq!(read.to_bytes(), bytes);
        let text = bundle.to_string();
        prop_assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)));
        prop_assert_eq!(&format!("{blanks}{text}{blanks}").parse::<BundleDescriptor>().unwrap(), &bundle);
        let json = serde_json::to_string(&bundle).unwrap();
        prop_assert_eq!(&serde_json::from_str::<BundleDescriptor>(&json).unwrap(), &bundle);
        let packed = postcard::to_stdvec(&bundle).unwrap();
        prop_assert_eq!(postcard::from_bytes::<BundleDescriptor>(&packed).unwrap(), bundle);
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_of_a_bundle_is_noticed(
        bundle in bundle(),
        flips in vec((any::<Index>(), 0_u8..8), 32),
        more in vec(any::<u8>(), 1..9),
    ) {
        let bytes = bundle.to_bytes();
        for (at, bit) in flips {
            let mut damaged = bytes.clone();
            damaged[at.index(bytes.len())] ^= 1 << bit;
            prop_assert!(BundleDescriptor::from_bytes(&damaged).is_err());
        }
        for len in (0..bytes.len()).step_by(1 + bytes.len() / 200) {
            prop_assert!(BundleDescriptor::from_bytes(&bytes[..len]).is_err(), "{} bytes", len);
        }
        prop_assert!(BundleDescriptor::from_bytes(&[bytes, more].concat()).is_err());
    }

    #[test]
    fn damage_that_the_checksum_hides_is_refused_or_read_consistently(
        bundle in bundle(),
        damage in vec((any::<Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = bundle.to_bytes();
        for (at, byte) in damage {
            let at = at.index(bytes.len() - 4);
            bytes[at] = byte;
        }
        if let Ok(read) = BundleDescriptor::from_bytes(&repaired(bytes)) {
            crate::fuzzing::show_bundle(&read);
            prop_assert_eq!(BundleDescriptor::from_bytes(&read.to_bytes()).unwrap(), read);
        }
    }

    #[test]
    fn arbitrary_bytes_are_neither_a_bundle_nor_a_table(bytes in vec(any::<u8>(), 0..400), text in ".{0,200}") {
        prop_assert!(BundleDescriptor::from_bytes(&bytes).is_err());
        prop_assert!(TensorTable::from_bytes(&bytes).is_err());
        prop_assert!((BUNDLE_TEXT_PREFIX.to_owned() + &text).parse::<BundleDescriptor>().is_err());
        for magic in [b"DIPB\x01\x00", b"DIPT\x01\x00"] {
            let bytes = [magic.as_slice(), &bytes].concat();
            prop_assert!(BundleDescriptor::from_bytes(&bytes).is_err() && TensorTable::from_bytes(&bytes).is_err());
        }
    }

    #[test]
    fn neither_the_view_nor_debug_shows_a_token(bundle in bundle()) {
        let json = serde_json::to_string(&bundle.view()).unwrap();
        let debug = format!("{bundle:?} {bundle:#?}");
        for part in &bundle.contents().parts {
            for spelling in spellings(&part.token.to_bytes()) {
                prop_assert!(!json.contains(&spelling) && !debug.contains(&spelling), "{spelling} is shown");
            }
        }
    }

    #[test]
    fn a_table_is_read_back_and_finds_its_tensors(tensors in tensors()) {
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
        prop_assert_eq!(read.get("no tensor is called so"), None);
        prop_assert!(table.check_fits(table.region_bytes()).is_ok());
        prop_assert!(table.region_bytes() == 0 || table.check_fits(table.region_bytes() - 1).is_err());
    }

    #[test]
    fn damaged_tables_are_refused_or_read_consistently(
        tensors in tensors(),
        damage in vec((any::<Index>(), any::<u8>()), 1..4),
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
    fn packed_tensors_are_aligned_and_lie_one_behind_the_other(layouts in vec(layout(), 0..20), power in 0_u32..12) {
        let align = 1_u64 << power;
        let named = layouts.iter().cloned().enumerate().map(|(index, layout)| (index.to_string(), layout));
        let table = TensorTable::packed(align, named).unwrap();
        let mut end = 0;
        for ((_, offset, layout), given) in table.iter().zip(&layouts) {
            prop_assert_eq!(layout, given);
            prop_assert!(offset >= end && offset - end < align && offset.is_multiple_of(align));
            end = offset + layout.span_bytes().unwrap();
        }
        prop_assert_eq!(table.region_bytes(), table.iter().map(|(_, at, layout)| at + layout.span_bytes().unwrap()).max().unwrap_or(0));
    }
}

fn bytes(elements: u64) -> TensorLayout {
    TensorLayout::contiguous(Dtype::U8, [elements]).unwrap()
}

#[test]
fn names_are_given_once_and_have_1_to_1024_bytes() {
    let named = |names: &[&str]| {
        let tensors = names.iter().map(|name| (*name, 0, bytes(1)));
        TensorTable::new(tensors).map(|table| table.len()).map_err(|error| error.to_string())
    };
    assert_eq!(named(&["a", "b", "aa"]), Ok(3));
    assert!(named(&["a", "b", "a"]).unwrap_err().contains("\"a\": another tensor is called so"));
    assert!(named(&[""]).unwrap_err().contains("at least one byte"));
    assert_eq!(named(&[&"x".repeat(1024)]), Ok(1));
    let refused = named(&[&"x".repeat(1025)]).unwrap_err();
    assert!(refused.contains("at most 1024") && refused.len() < 200, "{refused}");
}

#[test]
fn a_table_that_does_not_fit_names_the_tensor() {
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
fn a_tensor_that_leaves_its_memory_is_named() {
    let contents = crate::fuzzing::plain_bundle().contents().clone();
    let of = |offset, layout: TensorLayout| {
        let table = TensorTable::new([("w", offset, layout)]).unwrap();
        let tensors = Arc::new(Tensors::new(table, vec![0]));
        let bundle = BundleDescriptor::new(Contents { tensors, ..contents.clone() });
        BundleDescriptor::from_bytes(&bundle.to_bytes()).map(|_| ())
    };
    let first = contents.parts[0].regions.iter().next().unwrap();
    let size = first.iter().map(|extent| extent.size).sum::<u64>();
    assert_eq!(of(size - 4, bytes(4)), Ok(()));
    assert_eq!(of(size, bytes(0)), Ok(()));
    let too_large = |needed| {
        let cause = LayoutError::TooLarge { needed, region: size };
        Err(DescriptorError::Tensor { name: "w".into(), cause })
    };
    assert_eq!(of(size - 3, bytes(4)), too_large(size + 1));
    assert_eq!(of(size + 1, bytes(0)), too_large(size + 1));
    assert_eq!(of(0, bytes(1).with_offset(size).unwrap()), too_large(size + 1));
}

#[test]
fn senseless_bundles_are_refused() {
    let contents = crate::fuzzing::plain_bundle().contents().clone();
    let refused = |change: &dyn Fn(&mut Contents)| {
        let mut changed = contents.clone();
        change(&mut changed);
        let read = BundleDescriptor::from_bytes(&BundleDescriptor::new(changed).to_bytes());
        read.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(refused(&|_| {}), "");
    assert!(refused(&|bundle| bundle.parts.clear()).contains("parts makes no sense"));
    let with_regions = |regions: Vec<Vec<DescribedExtent>>| {
        refused(&|bundle| bundle.parts[0].regions = Arc::new(regions.iter().cloned().collect()))
    };
    let extent = DescribedExtent { size: 1, generation: 0 };
    assert!(with_regions(vec![]).contains("one has no memory"));
    assert!(with_regions(vec![vec![]]).contains("allocations"));
    assert!(with_regions(vec![vec![DescribedExtent { size: 0, ..extent }]]).contains("one has no bytes"));
    assert!(refused(&|bundle| bundle.parts[1].export = bundle.parts[0].export).contains("the same export"));
    let listed = |table: TensorTable, regions| {
        refused(&|bundle| bundle.tensors = Arc::new(Tensors::new(table.clone(), Vec::clone(&regions))))
    };
    assert!(listed(contents.table().clone(), vec![99, 1, 2]).contains("region 99"));
    assert!(listed(TensorTable::default(), vec![]).contains("there are none"));
    let huge = DescribedExtent { size: u64::MAX, generation: 0 };
    assert!(with_regions(vec![vec![huge; 2]]).contains("64 bits"));
    assert!(with_regions(vec![vec![extent; 2048]; 33]).contains("more than 65536"));

    let bytes = BundleDescriptor::new(contents.clone()).to_bytes();
    let with = |at: usize, byte: u8| {
        let mut changed = bytes.clone();
        changed[at] = byte;
        BundleDescriptor::from_bytes(&repaired(changed)).unwrap_err().to_string()
    };
    assert!(with(4, 2).contains("the bundle has format 2.0") && with(4, 2).contains("receiving"));
    assert!(with(6, 0x80).contains("features"), "a flag that this version does not know");
    assert!(with(0, b'X').contains("no device-ipc bundle"));
    let plain = crate::fuzzing::plain_descriptor();
    assert!(BundleDescriptor::from_bytes(&plain.to_bytes()).unwrap_err().to_string().contains("dipcb."));
    assert!(plain.to_string().parse::<BundleDescriptor>().unwrap_err().to_string().contains("dipcb."));
}
