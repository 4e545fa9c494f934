//! Fuzz entry points of the packets that an end of a channel reads.

use std::borrow::Cow;

use super::handshake::{Greeting, Hello};
use crate::fuzzing::{SOMEBODY, Seed, plain_descriptor, plain_tensors};
use crate::model::device::DeviceIdentity;
use crate::model::placement::DeviceMap;
use crate::transport::socket::ReceivedFds;
use crate::wire::Token;
use crate::wire::channel::{
    DescriptorBytes, Grants, Head, Incoming, Item, MAX_PACKET_BYTES, Outgoing, read, read_message,
};
use crate::wire::descriptor::ExportId;

/// The message limit of the channel.
const LIMIT: u64 = 1 << 20;

/// Reads the bytes as a packet, as the contents of an inbox, and as the file of a packet.
pub(crate) fn packet(bytes: &[u8]) {
    message(bytes.to_vec(), ReceivedFds::default());
    let _ = read_message(bytes.to_vec());
    if let Ok(Outgoing { packet, file: Some(file), .. }) = Outgoing::raw_file(bytes) {
        message(packet, [file].into_iter().collect());
    }
}

/// Checks that a valid message round-trips.
fn message(packet: Vec<u8>, fds: ReceivedFds) {
    let Ok(Incoming::Message { head, bytes }) = read(packet, fds, LIMIT) else { return };
    assert!(
        head.items.len() <= crate::wire::channel::MAX_MESSAGE_TENSORS && bytes.bytes().len() as u64 <= LIMIT
    );
    let Ok(outgoing) = Outgoing::of(&head, bytes.bytes(), LIMIT, Vec::new()) else {
        panic!("a message that was read exceeds the limit");
    };
    assert!(outgoing.packet.len() <= MAX_PACKET_BYTES);
    let standalone = outgoing
        .message()
        .map(|message| read_message(message.to_vec()).expect("the message was just written"));
    let Outgoing { packet, file, .. } = outgoing;
    let again = read(packet, file.into_iter().collect::<ReceivedFds>(), LIMIT).expect("it was just written");
    let Incoming::Message { head: again, bytes: again_bytes } = again else { panic!("it was a message") };
    assert_eq!(again_bytes.bytes(), bytes.bytes());
    assert_eq!(written(&again), written(&head));
    if let Some(Incoming::Message { head: standalone, bytes }) = standalone {
        assert_eq!((written(&standalone), bytes.bytes()), (written(&head), again_bytes.bytes()));
    }
}

fn written(head: &Head<'_>) -> Vec<u8> {
    postcard::to_stdvec(head).expect("the value was read from bytes")
}

/// Checks that a valid greeting round-trips.
pub(crate) fn greeting(bytes: &[u8]) {
    let Ok(read) = Greeting::decode(bytes) else { return };
    let written = read.encode().expect("the value was read from bytes");
    let again = Greeting::decode(&written).expect("the message was just written");
    assert_eq!(again.encode().expect("the message was just written"), written);
}

/// Returns the head of a message with `tensors` tensors.
pub(super) fn head(tensors: usize, grants: bool) -> Head<'static> {
    let grant = grants.then(|| Token::from_bytes([0x77; 16]));
    let item = || Item {
        descriptor: DescriptorBytes(Cow::Owned(plain_descriptor())),
        grants: Grants(grant.into_iter().collect()),
    };
    let ended = vec![(ExportId(3), Token::from_bytes([0x88; 16])); tensors.min(4)];
    Head {
        reply: grants,
        ready: tensors as u64,
        ended,
        items: std::iter::repeat_with(item).take(tensors).collect(),
    }
}

/// Returns the head of a message with one tensor and one bundle with `grants` grants.
fn bundle_head(grants: usize) -> Head<'static> {
    let mut head = head(1, true);
    let grants = Grants((0..grants).map(|part| Token::from_bytes([part as u8; 16])).collect());
    head.items.push(Item { descriptor: DescriptorBytes(Cow::Owned(plain_tensors())), grants });
    head
}

/// Returns the hello of an end with two devices.
pub(super) fn hello() -> Hello {
    let devices = [1, 2].map(|byte| DeviceIdentity::Uuid([byte; 16])).to_vec();
    let map = DeviceMap::new().insert(0, devices[1]).and_then(|map| map.insert(devices[1], 0));
    let mut hello = Hello::new("mock", SOMEBODY, devices, &map.expect("the map is one to one"), LIMIT);
    hello.program = "fuzzer".into();
    hello
}

pub(crate) fn seeds() -> Vec<Seed> {
    let message = |tensors, grants, bytes: &[u8]| {
        Outgoing::of(&head(tensors, grants), bytes, LIMIT, Vec::new()).expect("a seed is short").packet
    };
    let bundle = |grants| {
        Outgoing::of(&bundle_head(grants), b"state", LIMIT, Vec::new()).expect("a seed is short").packet
    };
    let greeting = |greeting: Greeting| greeting.encode().expect("a seed is short");
    vec![
        ("bytes", message(0, false, b"bytes")),
        ("empty", message(0, false, b"")),
        ("tensor", message(1, true, b"weights")),
        ("forwarded", message(1, false, b"")),
        ("tensors", message(7, true, b"layers")),
        ("bundle", bundle(2)),
        ("bundle-without-grants", bundle(0)),
        (
            "in-a-file",
            Outgoing::of(&head(0, false), &[5; 70_000], LIMIT, Vec::new()).expect("the message fits").packet,
        ),
        ("end", Outgoing::end().expect("the packet is short").packet),
        ("look", Outgoing::look().expect("the packet is short").packet),
        ("hello", greeting(Greeting::Hello(hello()))),
        ("not-allowed", greeting(Greeting::NotAllowed { uid: 1000 })),
    ]
}
