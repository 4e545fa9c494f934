//! Greetings and messages that are malformed, forged or incomplete.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use device_ipc_broker_tests::{
    Answer, Connection, DEADLINE, Forged, PINNING, Received, agent, bundle_of_another, eventually,
};
use device_ipc_core::{Descriptor, Ipc};
use device_ipc_mock::MockBackend;
use rustix::fs::SealFlags;

use super::raw::{SEALS, address, file, greeted, greeting, hello, varint};
use super::{connect, name};

#[test]
fn invalid_greetings_fail_no_accept_and_delay_no_other_peer() {
    let mut child = agent!(PINNING);
    let under = name("greetings");
    child.ok(&format!("listen {under}"));
    // Silent connections delay no other.
    let silent: Vec<_> = (0..3).map(|_| Connection::to(&address(&under)).expect("it listens")).collect();
    let raw = Connection::to(&address(&under)).expect("it listens");
    raw.send_bytes(b"GET / HTTP/1.1", &[]).expect("it reads");
    let newer = Connection::to(&address(&under)).expect("it listens");
    newer.send_bytes(&greeting(2, &hello()), &[]).expect("it reads");
    let liar = Connection::to(&address(&under)).expect("it listens");
    let mut other = hello();
    other.process.pid = 1;
    liar.send_bytes(&greeting(1, &other), &[]).expect("it reads");
    // The first accept returns the peer that follows the protocol.
    let (peer, _page) = greeted(&mut child, &under);
    assert!(matches!(liar.receive(DEADLINE), Received::Closed), "it is refused");
    // The others learn the version from the answer, whatever follows.
    for refused in [&raw, &newer] {
        match refused.receive(DEADLINE) {
            Received::Packet(bytes, _) => assert_eq!(&bytes[..10], b"dipcchan\x01\x00"),
            other => panic!("no answer, but {other:?}"),
        }
        assert!(matches!(refused.receive(DEADLINE), Received::Closed), "it is refused");
    }
    let raw = peer;
    raw.send_bytes(&[0, 0, 0, 0, 0, 0, 1], &[]).expect("it reads");
    assert_eq!(child.ok("receive c m 20000"), "2 0");
    drop(silent);
}

/// Each of them breaks the channel off, with a reason, and nothing else.
#[test]
fn malformed_messages_close_the_channel() {
    let mut child = agent!(PINNING);
    let under = name("garbage");
    child.ok(&format!("listen {under}"));
    let mut sharing = agent!(PINNING);
    let third = sharing.share("x 4096");
    let bundle: Descriptor = sharing.ok("share-blocks b 2 4096 devices=2").parse().expect("it is a bundle");
    drop(sharing);
    let bundle_with = |descriptor: &[u8], grants: u64| {
        // As above, and a bundle with `grants` grants.
        let descriptor = [varint(descriptor.len() as u64), descriptor.to_vec()].concat();
        let tokens = vec![7; 16 * grants as usize];
        [vec![0, 0, 0, 0, 1], descriptor, varint(grants), tokens].concat()
    };
    let own = bundle_of_another(&bundle, &hello().process);
    let granted = {
        // Not a reply, ready, no ended grants, one tensor with a grant, of another process.
        let mut packet = vec![0, 0, 0, 0, 1];
        packet.extend(varint(third.to_bytes().len() as u64));
        packet.extend(third.to_bytes());
        packet.push(1);
        packet.extend(Forged::of(&third).token());
        packet
    };
    let head = |items: u64| [vec![0, 0, 0, 0], varint(items)].concat();
    let in_file = |bytes: u64| [vec![1], varint(bytes)].concat();
    let empty = [0_u8; 4];
    let cases: Vec<(Vec<u8>, Vec<OwnedFd>, &str)> = vec![
        (vec![9, 9, 9], vec![], "packet cannot be decoded"),
        (head(1 << 40), vec![], "head of its message cannot be decoded"),
        (head(1025), vec![], "head of its message cannot be decoded"),
        (granted, vec![], "another process shares"),
        (bundle_with(&bundle.to_bytes(), 2), vec![], "another process shares"),
        (bundle_with(&own, 1), vec![], "wrong number of grants"),
        (bundle_with(&own, 3), vec![], "wrong number of grants"),
        (bundle_with(&own, 65), vec![], "head of its message cannot be decoded"),
        (bundle_with(&own[..own.len() - 1], 2), vec![], "head of its message cannot be decoded"),
        ([vec![0, 0], varint(1 << 62), vec![0, 0]].concat(), vec![], "invalid counter value"),
        (head(0), vec![file(b"x", SEALS)], "does not mention"),
        (in_file(1 << 40), vec![file(b"x", SEALS)], "agreed limit"),
        (in_file(4), vec![file(&empty, SealFlags::SHRINK)], "not a sealed memory file"),
        (in_file(4), vec![file(&[0; 5], SEALS)], "not the stated 4 B"),
        (in_file(4), vec![file(&empty, SEALS), file(&empty, SEALS)], "2 file descriptors for one"),
        (in_file(3), vec![file(&[0xff; 3], SEALS)], "head of its message cannot be decoded"),
        ([in_file(4), vec![0]].concat(), vec![file(&empty, SEALS)], "follow the size"),
        (vec![2, 0], vec![], "follow its end"),
        (vec![3, 0], vec![], "follow its wake-up"),
        (vec![3], vec![file(b"x", SEALS)], "does not mention"),
        (vec![0; 70_000], vec![], "exceeds the maximum"),
        (vec![0; 200_000], vec![], "exceeds the maximum"),
    ];
    let before = {
        let (raw, _page) = greeted(&mut child, &under);
        drop(raw);
        child.ok("drop-channel c");
        child.census().all_descriptors()
    };
    for (packet, fds, why) in cases {
        let (raw, _page) = greeted(&mut child, &under);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        raw.send_bytes(&packet, &fds).expect("it reads");
        raw.send_bytes(&[0, 0, 0, 0, 0], &[]).expect("it is still open");
        let text = child.fails("receive c m 20000", "Protocol");
        assert!(text.contains(why), "{why}: {text}");
        assert_eq!(child.fails("receive c m 20000", "Protocol"), text, "it stays so");
        child.fails("send c 1 20000", "Protocol");
        raw.is_closed_within(DEADLINE);
        child.ok("drop-channel c");
    }
    eventually("nothing is left of them", true, || child.census().all_descriptors() <= before);
}

/// An open lease is no right for a peer that does not know the export's token, whatever grant its message states.
#[test]
fn tensor_with_a_wrong_token_is_not_opened_over_an_open_lease() {
    let ipc = Ipc::with_backend(MockBackend::from_spec(PINNING).expect("a machine"));
    let export = ipc.share(ipc.allocate(0, 4096).expect("memory")).start().expect("it can be shared");
    let right = export.descriptor();
    let wrong = Forged::of(right).with_token([7; 16]).finish();
    let mut child = agent!(PINNING);
    let under = name("wrong-token");
    child.ok(&format!("listen {under}"));
    child.ok(&format!("open x {right}"));
    let (raw, _page) = greeted(&mut child, &under);
    // One tensor with a grant, of this process: not a reply, ready, no ended grants.
    let with_grant = |descriptor: &Descriptor, grant: [u8; 16]| {
        let bytes = descriptor.to_bytes();
        [vec![0, 0, 0, 0, 1], varint(bytes.len() as u64), bytes, vec![1], grant.to_vec()].concat()
    };
    for grant in [[7; 16], Forged::of(right).token()] {
        raw.send_bytes(&with_grant(&wrong, grant), &[]).expect("it reads");
        assert_eq!(child.ok("receive c m 20000"), "0 1");
        let text = child.fails("open-received m y place=stream:0", "NotPermitted");
        assert!(text.contains("token"), "{text}");
        child.ok("discard m");
    }
    // The same message with the token of the export opens over that lease.
    raw.send_bytes(&with_grant(right, Forged::of(right).token()), &[]).expect("it reads");
    assert_eq!(child.ok("receive c m 20000"), "0 1");
    child.ok("open-received m y place=stream:0");
}

/// A message that was received can still be opened after its receiver has closed the channel, and the sender waits for that.
#[test]
fn close_waits_for_tensors_that_the_peer_received_before_it_closed() {
    let (mut sender, mut receiver) = (agent!(PINNING), agent!(PINNING));
    let under = name("close-waits");
    receiver.ok(&format!("listen {under}"));
    connect(&mut receiver, &mut sender, &under);
    sender.share("x 4096");
    sender.ok("send c 5 20000 of=x");
    assert_eq!(receiver.ok("receive c m 20000"), "5 1");
    receiver.ok("drop-channel c");
    sender.send("close-channel c 15000");
    sender.says_nothing_for(Duration::from_millis(100));
    receiver.ok("open-received m y place=stream:0");
    assert_eq!(sender.receive(), Answer::Done(String::new()));
    // A message that the peer has not received before its close is lost, also where the peer keeps an earlier one.
    let (mut sender, mut receiver) = (agent!(PINNING), agent!(PINNING));
    receiver.ok(&format!("listen {under}-2"));
    connect(&mut receiver, &mut sender, &format!("{under}-2"));
    sender.share("x 4096");
    sender.ok("send c 5 20000 of=x");
    sender.ok("send c 5 20000 of=x");
    assert_eq!(receiver.ok("receive c m 20000"), "5 1");
    sender.send("close-channel c 15000");
    sender.says_nothing_for(Duration::from_millis(50));
    receiver.ok("drop-channel c");
    match sender.receive() {
        Answer::Failed(failure) => assert_eq!(failure.kind, "ChannelClosed", "{failure:?}"),
        other => panic!("{other:?}"),
    }
}

/// An open lease is no reason to open memory that its exporter has freed, neither by descriptor nor by message.
#[test]
fn borrowed_memory_that_was_freed_is_stale_where_it_is_open() {
    let (mut sender, mut receiver) = (agent!(PINNING), agent!(PINNING));
    let under = name("stale");
    receiver.ok(&format!("listen {under}"));
    connect(&mut receiver, &mut sender, &under);
    sender.ok("allocate b 4096");
    let descriptor = sender.ok("share-borrowed x b");
    receiver.ok(&format!("open before {descriptor}"));
    sender.ok("send c 5 20000 of=x");
    assert_eq!(receiver.ok("receive c m 20000"), "5 1");
    sender.ok("free b");
    receiver.fails(&format!("open after {descriptor}"), "StaleGeneration");
    receiver.fails("open-received m after place=stream:0", "StaleGeneration");
    // The exporter of a dropped export cannot check it, and the grant of the message is still valid.
    sender.ok("allocate b 4096");
    let descriptor = sender.ok("share-borrowed y b");
    receiver.ok(&format!("open kept {descriptor}"));
    sender.ok("send c 5 20000 of=y");
    assert_eq!(receiver.ok("receive c m 20000"), "5 1");
    sender.ok("drop y");
    receiver.fails(&format!("open after {descriptor}"), "ExportDropped");
    receiver.ok("open-received m after place=stream:0");
}

/// A message whose file does not arrive is the only one lost: the receiver may have no free descriptors.
#[test]
fn message_without_its_file_is_the_only_one_lost() {
    let mut child = agent!(PINNING);
    let under = name("lost");
    child.ok(&format!("listen {under}"));
    let (raw, _page) = greeted(&mut child, &under);
    raw.send_bytes(&[1, 4], &[]).expect("it reads");
    raw.send_bytes(&[0, 0, 0, 0, 0, 0], &[]).expect("it reads");
    assert!(child.fails("receive c m 20000", "Io").contains("ulimit -n"));
    assert_eq!(child.ok("receive c m 20000"), "1 0");
}
