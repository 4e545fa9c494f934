//! Property tests of the packets of channels, on arbitrary messages and bytes.

use std::borrow::Cow;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::fuzzing::{self, head, hello};
use super::handshake::Greeting;
use crate::fuzzing::{plain_descriptor, plain_tensors};
use crate::model::error::Error;
use crate::transport::socket::ReceivedFds;
use crate::wire::Token;
use crate::wire::channel::MAX_ENDED_GRANTS;
use crate::wire::channel::MAX_MESSAGE_TENSORS;
use crate::wire::channel::{DescriptorBytes, Grants, Head, Incoming, Item, MAX_PACKET_BYTES, Outgoing, read};
use crate::wire::descriptor::{DescribedRegion, ExportId, MAX_REGIONS_SECTIONS, Memory};

fn item() -> impl Strategy<Value = Item<'static>> {
    prop_oneof![4 => tensor(), 1 => bundle()]
}

fn bundle() -> impl Strategy<Value = Item<'static>> {
    vec(any::<[u8; 16]>(), 0..=MAX_REGIONS_SECTIONS).prop_map(|grants| Item {
        descriptor: DescriptorBytes(Cow::Owned(plain_tensors())),
        grants: Grants(grants.into_iter().map(Token::from_bytes).collect()),
    })
}

fn tensor() -> impl Strategy<Value = Item<'static>> {
    (any::<u64>(), 1..=1_u64 << 20, option::of(any::<[u8; 16]>())).prop_map(|(export, len, grant)| {
        let descriptor = plain_descriptor().with(|contents| {
            contents.parts[0].export = ExportId(export);
            contents.memory = Memory::Region(DescribedRegion { offset: 0, len, layout: None });
        });
        Item {
            descriptor: DescriptorBytes(Cow::Owned(descriptor)),
            grants: Grants(grant.into_iter().map(Token::from_bytes).collect()),
        }
    })
}

fn heads() -> impl Strategy<Value = Head<'static>> {
    let ended = vec(any::<(u64, [u8; 16])>(), 0..=MAX_ENDED_GRANTS);
    (any::<bool>(), any::<u64>(), ended, vec(item(), 0..20)).prop_map(|(reply, ready, ended, items)| {
        let ended = ended.into_iter().map(|(export, token)| (ExportId(export), Token::from_bytes(token)));
        Head { reply, ready, ended: ended.collect(), items }
    })
}

fn encoded(head: &Head<'_>) -> Vec<u8> {
    postcard::to_stdvec(head).unwrap()
}

proptest! {
    #[test]
    fn message_round_trips_in_packet_or_file(
        head in heads(),
        bytes in prop_oneof![vec(any::<u8>(), 0..200), vec(any::<u8>(), 60_000..80_000)],
    ) {
        let outgoing = Outgoing::of(&head, &bytes, 1 << 20, Vec::new()).unwrap();
        prop_assert!(outgoing.packet.len() <= MAX_PACKET_BYTES);
        let whole = encoded(&head).len() + bytes.len() < MAX_PACKET_BYTES;
        prop_assert_eq!(outgoing.file.is_none(), whole);
        let read = read(outgoing.packet, outgoing.file.into_iter().collect::<ReceivedFds>(), 1 << 20).unwrap();
        let Incoming::Message { head: again, bytes: read } = read else { panic!("it is a message") };
        prop_assert_eq!(encoded(&again), encoded(&head));
        prop_assert_eq!(read.bytes(), bytes.as_slice());
    }

    #[test]
    fn arbitrary_bytes_are_harmless(bytes in vec(any::<u8>(), 0..300)) {
        fuzzing::packet(&bytes);
        fuzzing::greeting(&bytes);
    }

    /// Reads a valid packet with one flipped bit.
    #[test]
    fn flipped_bit_is_harmless(tensors in 0_usize..3, at in any::<prop::sample::Index>(), bit in 0..8) {
        let message = Outgoing::of(&head(tensors, true), b"bytes", 1 << 20, Vec::new()).unwrap().packet;
        for mut packet in [message, Greeting::Hello(hello()).encode().unwrap()] {
            let at = at.index(packet.len());
            packet[at] ^= 1_u8 << bit;
            fuzzing::packet(&packet);
            fuzzing::greeting(&packet);
        }
    }
}

#[test]
fn seeds_are_valid() {
    for (name, bytes) in fuzzing::seeds() {
        let greets = Greeting::decode(&bytes).is_ok();
        let speaks = read(bytes.clone(), ReceivedFds::default(), 1 << 20).is_ok();
        // A packet that refers to a file is invalid without it.
        assert!(greets || speaks || name == "in-a-file", "{name}");
        fuzzing::packet(&bytes);
        fuzzing::greeting(&bytes);
    }
}

#[test]
fn too_long_lists_are_rejected() {
    let most = encoded(&head(MAX_MESSAGE_TENSORS, false));
    assert!(postcard::from_bytes::<Head<'_>>(&most).is_ok());
    let more = encoded(&head(MAX_MESSAGE_TENSORS + 1, false));
    assert!(postcard::from_bytes::<Head<'_>>(&more).is_err());
    let grants = |count: usize| {
        let grants = Grants(vec![Token::from_bytes([1; 16]); count].into_iter().collect());
        let descriptor = DescriptorBytes(Cow::Owned(plain_tensors()));
        encoded(&Head { items: vec![Item { descriptor, grants }], ..head(0, false) })
    };
    assert!(postcard::from_bytes::<Head<'_>>(&grants(MAX_REGIONS_SECTIONS)).is_ok());
    assert!(postcard::from_bytes::<Head<'_>>(&grants(MAX_REGIONS_SECTIONS + 1)).is_err());
}

#[test]
fn message_limit_counts_head_and_bytes() {
    let size = encoded(&head(1, true)).len() as u64 + 5;
    assert!(Outgoing::of(&head(1, true), b"bytes", size, Vec::new()).is_ok());
    let refused = Outgoing::of(&head(1, true), b"bytes", size - 1, Vec::new());
    assert!(matches!(refused, Err(Error::MessageTooLarge { of: "bytes", size: found, .. }) if found == size));
}

#[test]
fn other_version_error_names_both_versions() {
    let mut packet = Greeting::Hello(hello()).encode().unwrap();
    packet[8..10].copy_from_slice(&7_u16.to_le_bytes());
    packet.truncate(10);
    let text = Greeting::decode(&packet).unwrap_err().to_string();
    assert!(text.contains("version 7") && text.contains("version 1"), "{text}");
}
