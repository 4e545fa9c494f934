//! Property tests of the packets of channels, on arbitrary messages and bytes.

use std::borrow::Cow;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::handshake::{Greeting, Hello};
use crate::model::device::DeviceIdentity;
use crate::model::error::Error;
use crate::model::placement::DeviceMap;
use crate::transport::socket::ReceivedFds;
use crate::wire::Token;
use crate::wire::channel::{
    DescriptorBytes, GrantTokens, Head, IncomingPacket, Item, MAX_ENDED_GRANTS, MAX_MESSAGE_TENSORS,
    MAX_PACKET_BYTES, OutgoingPacket, read, read_message,
};
use crate::wire::descriptor::{DescribedRegion, ExportId, MAX_REGIONS_SECTIONS, Memory};
use crate::wire::examples::{SOMEBODY, plain_descriptor, plain_tensors};

/// The message limit of the channel.
const LIMIT: u64 = 1 << 20;

/// Reads the bytes as a packet, as the contents of an inbox, and as the file of a packet.
fn packet(bytes: &[u8]) {
    message(bytes.to_vec(), ReceivedFds::default());
    let _ = read_message(bytes.to_vec());
    if let Ok(OutgoingPacket { packet, file: Some(file), .. }) = OutgoingPacket::raw_file(bytes) {
        message(packet, [file].into_iter().collect());
    }
}

/// Checks that a valid message round-trips.
fn message(packet: Vec<u8>, fds: ReceivedFds) {
    let Ok(IncomingPacket::Message { head, bytes }) = read(packet, fds, LIMIT) else { return };
    assert!(
        head.items.len() <= crate::wire::channel::MAX_MESSAGE_TENSORS && bytes.bytes().len() as u64 <= LIMIT
    );
    let Ok(outgoing) = OutgoingPacket::of(&head, bytes.bytes(), LIMIT, Vec::new()) else {
        panic!("a message that was read exceeds the limit");
    };
    assert!(outgoing.packet.len() <= MAX_PACKET_BYTES);
    let standalone = outgoing
        .message()
        .map(|message| read_message(message.to_vec()).expect("the message was just written"));
    let OutgoingPacket { packet, file, .. } = outgoing;
    let again = read(packet, file.into_iter().collect::<ReceivedFds>(), LIMIT).expect("it was just written");
    let IncomingPacket::Message { head: again, bytes: again_bytes } = again else {
        panic!("it was a message")
    };
    assert_eq!(again_bytes.bytes(), bytes.bytes());
    assert_eq!(written(&again), written(&head));
    if let Some(IncomingPacket::Message { head: standalone, bytes }) = standalone {
        assert_eq!((written(&standalone), bytes.bytes()), (written(&head), again_bytes.bytes()));
    }
}

fn written(head: &Head<'_>) -> Vec<u8> {
    postcard::to_stdvec(head).expect("the value was read from bytes")
}

/// Checks that a valid greeting round-trips.
fn greeting(bytes: &[u8]) {
    let Ok(read) = Greeting::decode(bytes) else { return };
    let written = read.encode().expect("the value was read from bytes");
    let again = Greeting::decode(&written).expect("the message was just written");
    assert_eq!(again.encode().expect("the message was just written"), written);
}

/// Returns the head of a message with `tensors` tensors.
fn head(tensors: usize, grants: bool) -> Head<'static> {
    let grant = grants.then(|| Token::from_bytes([0x77; 16]));
    let item = || Item {
        descriptor: DescriptorBytes(Cow::Owned(plain_descriptor())),
        grants: GrantTokens(grant.into_iter().collect()),
    };
    let ended = vec![(ExportId(3), Token::from_bytes([0x88; 16])); tensors.min(4)];
    Head {
        reply: grants,
        ready: tensors as u64,
        ended,
        items: std::iter::repeat_with(item).take(tensors).collect(),
    }
}

/// Returns the hello of an end with two devices.
fn hello() -> Hello {
    let devices = [1, 2].map(|byte| DeviceIdentity::Uuid([byte; 16])).to_vec();
    let map = DeviceMap::new().insert(0, devices[1]).and_then(|map| map.insert(devices[1], 0));
    let mut hello = Hello::new("mock", SOMEBODY, devices, &map.expect("the map is one to one"), LIMIT);
    hello.program = "fuzzer".into();
    hello
}

fn item() -> impl Strategy<Value = Item<'static>> {
    prop_oneof![4 => tensor(), 1 => bundle()]
}

fn bundle() -> impl Strategy<Value = Item<'static>> {
    vec(any::<[u8; 16]>(), 0..=MAX_REGIONS_SECTIONS).prop_map(|grants| Item {
        descriptor: DescriptorBytes(Cow::Owned(plain_tensors())),
        grants: GrantTokens(grants.into_iter().map(Token::from_bytes).collect()),
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
            grants: GrantTokens(grant.into_iter().map(Token::from_bytes).collect()),
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
        let outgoing = OutgoingPacket::of(&head, &bytes, 1 << 20, Vec::new()).unwrap();
        prop_assert!(outgoing.packet.len() <= MAX_PACKET_BYTES);
        let whole = encoded(&head).len() + bytes.len() < MAX_PACKET_BYTES;
        prop_assert_eq!(outgoing.file.is_none(), whole);
        let read = read(outgoing.packet, outgoing.file.into_iter().collect::<ReceivedFds>(), 1 << 20).unwrap();
        let IncomingPacket::Message { head: again, bytes: read } = read else { panic!("it is a message") };
        prop_assert_eq!(encoded(&again), encoded(&head));
        prop_assert_eq!(read.bytes(), bytes.as_slice());
    }

    #[test]
    fn arbitrary_bytes_are_harmless(bytes in vec(any::<u8>(), 0..300)) {
        packet(&bytes);
        greeting(&bytes);
    }

    #[test]
    fn damaged_packet_is_harmless(
        head in heads(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let in_file = OutgoingPacket::of(&head, &[5; 70_000], LIMIT, Vec::new()).unwrap().packet;
        let message = OutgoingPacket::of(&head, b"bytes", LIMIT, Vec::new()).unwrap().packet;
        let hello = Greeting::Hello(hello()).encode().unwrap();
        let refusal = Greeting::NotAllowed { uid: 1000 }.encode().unwrap();
        let [end, look] = [OutgoingPacket::end(), OutgoingPacket::look()].map(|outgoing| outgoing.unwrap().packet);
        for mut bytes in [in_file, message, hello, refusal, end, look] {
            for (at, byte) in &damage {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            packet(&bytes);
            greeting(&bytes);
        }
    }
}

#[test]
fn too_long_lists_are_rejected() {
    let most = encoded(&head(MAX_MESSAGE_TENSORS, false));
    assert!(postcard::from_bytes::<Head<'_>>(&most).is_ok());
    let more = encoded(&head(MAX_MESSAGE_TENSORS + 1, false));
    assert!(postcard::from_bytes::<Head<'_>>(&more).is_err());
    let grants = |count: usize| {
        let grants = GrantTokens(vec![Token::from_bytes([1; 16]); count].into_iter().collect());
        let descriptor = DescriptorBytes(Cow::Owned(plain_tensors()));
        encoded(&Head { items: vec![Item { descriptor, grants }], ..head(0, false) })
    };
    assert!(postcard::from_bytes::<Head<'_>>(&grants(MAX_REGIONS_SECTIONS)).is_ok());
    assert!(postcard::from_bytes::<Head<'_>>(&grants(MAX_REGIONS_SECTIONS + 1)).is_err());
}

#[test]
fn message_limit_counts_head_and_bytes() {
    let size = encoded(&head(1, true)).len() as u64 + 5;
    assert!(OutgoingPacket::of(&head(1, true), b"bytes", size, Vec::new()).is_ok());
    let refused = OutgoingPacket::of(&head(1, true), b"bytes", size - 1, Vec::new());
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
