//! What holds for every descriptor, tried on arbitrary ones.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use data_encoding::{BASE64, BASE64_NOPAD, BASE64URL_NOPAD, HEXLOWER, HEXUPPER};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::model::device::HostId;
use crate::model::tensor::{Dtype, MAX_DIMENSIONS};

pub(crate) fn identity() -> impl Strategy<Value = ProcessIdentity> {
    (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<(u64, u64, u32, u64)>()).prop_map(
        |(host, boot, (pid_namespace, net_namespace, pid, start_time))| ProcessIdentity {
            host: HostId::from_bytes(host),
            boot,
            pid_namespace,
            net_namespace,
            pid,
            start_time,
        },
    )
}

pub(crate) fn home() -> impl Strategy<Value = DeviceIdentity> {
    prop_oneof![
        any::<[u8; 16]>().prop_map(DeviceIdentity::Uuid),
        any::<([u8; 16], u32)>().prop_map(|(host, physical)| DeviceIdentity::HostPhysical {
            host: HostId::from_bytes(host),
            physical,
        }),
    ]
}

pub(crate) fn broker() -> impl Strategy<Value = BrokerAddress> {
    prop_oneof![
        vec(any::<u8>(), 1..=107).prop_map(BrokerAddress::Abstract),
        vec(1_u8.., 0..=106).prop_map(|mut name| {
            name.insert(0, b'/');
            BrokerAddress::Path(OsString::from_vec(name).into())
        }),
    ]
}

/// One to a few allocations, and a region in them: offset and length.
fn region() -> impl Strategy<Value = (Vec<DescribedExtent>, u64, u64)> {
    let extent = (1_u64..1 << 48, any::<u64>());
    vec(extent, 1..=5).prop_flat_map(|extents| {
        let extents: Vec<_> =
            extents.into_iter().map(|(size, generation)| DescribedExtent { size, generation }).collect();
        let all: u64 = extents.iter().map(|extent| extent.size).sum();
        (0..extents[0].size).prop_flat_map(move |offset| {
            (Just(extents.clone()), Just(offset), prop_oneof![1..=all - offset, Just(all - offset)])
        })
    })
}

/// A tensor, before it is known whether it fits the region.
pub(crate) fn layout() -> impl Strategy<Value = TensorLayout> {
    let dtype = proptest::sample::select(Dtype::ALL);
    let dimensions = vec((0_u64..6, 0_u64..50), 0..=5);
    let many = vec((Just(1_u64), any::<u64>()), MAX_DIMENSIONS);
    let dimensions = prop_oneof![9 => dimensions.boxed(), 1 => many.boxed()];
    (dtype, dimensions, prop_oneof![Just(0), 0_u64..300]).prop_map(|(dtype, dimensions, offset)| {
        let (shape, strides): (Vec<u64>, Vec<u64>) = dimensions.into_iter().unzip();
        let layout = TensorLayout::strided(dtype, shape, strides).expect("its sizes are small");
        layout.with_offset(offset).expect("it is small too")
    })
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let names = ("[A-Za-z0-9_-]{1,32}", home(), identity(), broker());
    let numbers = (any::<(u64, [u8; 16], bool, bool)>(), region(), proptest::option::of(layout()));
    (names, numbers).prop_map(|((backend, home, exporter, broker), (given, region, layout))| {
        let (export, token, writable, ready) = given;
        let (extents, offset, len) = region;
        Descriptor {
            backend,
            home,
            exporter,
            broker,
            export: ExportId(export),
            token: Token::from_bytes(token),
            access: if writable { Access::ReadWrite } else { Access::ReadOnly },
            ready,
            offset,
            len,
            extents,
            layout: layout.filter(|layout| layout.check_fits(len).is_ok()),
        }
    })
}

/// A secret's bytes, as somebody might write them.
pub(crate) fn spellings(secret: &[u8]) -> Vec<String> {
    let decimal: Vec<String> = secret.iter().map(u8::to_string).collect();
    let mut spellings = vec![HEXLOWER.encode(secret), HEXUPPER.encode(secret)];
    spellings.extend([BASE64.encode(secret), BASE64_NOPAD.encode(secret), BASE64URL_NOPAD.encode(secret)]);
    spellings.extend([decimal.join(","), decimal.join(", ")]);
    // Inside a longer text in Base64 it begins at one of three places; the characters at its ends hold other bits too.
    for (before, first) in [(0, 0), (1, 2), (2, 3)] {
        let encoded = BASE64URL_NOPAD.encode(&[vec![0; before], secret.to_vec()].concat());
        spellings.push(encoded[first..encoded.len() - 1].to_owned());
    }
    spellings
}

proptest! {
    // A failure prints its input; the checkout stays as it is.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_binary_form_is_read_back(descriptor in descriptor()) {
        let bytes = descriptor.to_bytes();
        prop_assert!(bytes.len() <= MAX_DESCRIPTOR_BYTES);
        let read = Descriptor::from_bytes(&bytes).unwrap();
        prop_assert_eq!(&read, &descriptor);
        prop_assert_eq!(read.to_bytes(), bytes);
    }

    #[test]
    fn the_text_form_is_read_back(descriptor in descriptor(), blanks in "[ \t\r\n]{0,3}") {
        let text = descriptor.to_string();
        prop_assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)));
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
    fn every_flipped_bit_is_noticed(descriptor in descriptor()) {
        let mut bytes = descriptor.to_bytes();
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Descriptor::from_bytes(&bytes).is_err(), "bit {}", bit);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn every_truncation_and_every_addition_is_noticed(descriptor in descriptor(), more in vec(any::<u8>(), 1..9)) {
        let bytes = descriptor.to_bytes();
        for len in 0..bytes.len() {
            prop_assert!(Descriptor::from_bytes(&bytes[..len]).is_err(), "{} bytes", len);
        }
        prop_assert!(Descriptor::from_bytes(&[bytes, more].concat()).is_err());
        let text = descriptor.to_string();
        for len in 0..text.len() {
            prop_assert!(text[..len].parse::<Descriptor>().is_err(), "{} characters", len);
        }
    }

    /// With the checksum set right again, so that the checks behind it are reached.
    #[test]
    fn damage_that_the_checksum_hides_is_refused_or_read_consistently(
        descriptor in descriptor(),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = descriptor.to_bytes();
        let covered = bytes.len() - 4;
        for (at, byte) in damage {
            bytes[at.index(covered)] = byte;
        }
        let checksum = crc32fast::hash(&bytes[..covered]);
        bytes[covered..].copy_from_slice(&checksum.to_le_bytes());
        if let Ok(read) = Descriptor::from_bytes(&bytes) {
            prop_assert_eq!(Descriptor::from_bytes(&read.to_bytes()).unwrap(), read);
        }
    }

    #[test]
    fn arbitrary_bytes_and_texts_do_not_panic(bytes in vec(any::<u8>(), 0..400), text in ".{0,200}") {
        prop_assert!(Descriptor::from_bytes(&bytes).is_err());
        prop_assert!(text.parse::<Descriptor>().is_err());
        let prefixed = TEXT_PREFIX.to_owned() + &text;
        prop_assert!(prefixed.parse::<Descriptor>().is_err());
    }

    #[test]
    fn neither_the_view_nor_debug_shows_the_token(descriptor in descriptor()) {
        let json = serde_json::to_string(&descriptor.view()).unwrap();
        let debug = format!("{descriptor:?} {descriptor:#?} {:?}", descriptor.token);
        for spelling in spellings(&descriptor.token.to_bytes()) {
            prop_assert!(!json.contains(&spelling), "{spelling} in {json}");
            prop_assert!(!debug.contains(&spelling), "{spelling} in {debug}");
        }
    }
}

/// Where nothing needs a later reader, an older one reads it: the bytes differ from format 1.0 in the minor version alone.
#[test]
fn an_offset_is_a_feature_that_older_readers_refuse() {
    let plain = crate::fuzzing::plain_descriptor();
    let layout = TensorLayout::contiguous(Dtype::F32, [8]).unwrap();
    let at = |offset| {
        let layout = Some(layout.clone().with_offset(offset).unwrap());
        Descriptor { layout, ..plain.clone() }.to_bytes()
    };
    let (without, with) = (at(0), at(3));
    assert_eq!((without[5], without[6]), (1, 0b0100), "a reader of format 1.0 knows these flags");
    assert_eq!((with[5], with[6]), (1, 0b1100), "and refuses this one");
    assert_eq!(with.len(), without.len() + 8);

    let repaired = |mut bytes: Vec<u8>| {
        let covered = bytes.len() - 4;
        let checksum = crc32fast::hash(&bytes[..covered]);
        bytes[covered..].copy_from_slice(&checksum.to_le_bytes());
        Descriptor::from_bytes(&bytes)
    };
    let mut of_an_older_version = without.clone();
    of_an_older_version[5] = 0;
    assert_eq!(repaired(of_an_older_version), Descriptor::from_bytes(&without));
    let mut zero = with.clone();
    let offset = zero.len() - 12;
    zero[offset..offset + 8].fill(0);
    assert!(matches!(repaired(zero), Err(DescriptorError::BadField { field: "tensor", .. })));
    let mut too_far = with.clone();
    too_far[offset + 7] = 0xff;
    assert_eq!(repaired(too_far), Err(DescriptorError::Layout(crate::model::tensor::LayoutError::Overflow)));
    let mut no_tensor = plain.to_bytes();
    no_tensor[6] |= 0b1000;
    assert!(matches!(repaired(no_tensor), Err(DescriptorError::BadField { field: "flags", .. })));
}

#[test]
fn the_spellings_are_found_where_a_secret_is_shown() {
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
