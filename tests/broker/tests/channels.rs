//! Channels whose other end dies at every point of the protocol, lies, stands still, forks, or is somebody else.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use device_ipc_broker_tests::{
    Answer, Before, Child, Connection, DEADLINE, Forged, PINNING, REVOKING, Received, agent,
    bundle_of_another, eventually, kill_points, kill_rounds, within,
};
use device_ipc_core::{BundleDescriptor, Descriptor, Ipc, ProcessIdentity};
use device_ipc_mock::MockBackend;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

/// The survivor's error comes in this time, whatever it waits for.
const ERROR_DEADLINE: Duration = Duration::from_secs(5);

/// A name that no other test has.
fn name(what: &str) -> String {
    format!("broker-{}-{what}", std::process::id())
}

/// What the messages hold.
#[derive(Clone, Copy, Debug)]
enum What {
    Tensor,
    /// Of two devices, so that it has two grants.
    Bundle,
}

impl What {
    /// Shares it, and says how it is sent.
    fn share(self, child: &mut Child) -> &'static str {
        match self {
            Self::Tensor => {
                child.share("x 8192");
                "of=x"
            }
            Self::Bundle => {
                child.ok("share-blocks x 4 8192 devices=2");
                "of=x"
            }
        }
    }

    /// The command that opens it.
    fn open(self, arguments: &str) -> String {
        match self {
            Self::Tensor => format!("open-received {arguments} place=stream:0"),
            Self::Bundle => format!("open-received-bundle {arguments} place=home"),
        }
    }
}

/// Connects the two; `survivor` listens.
fn connect(survivor: &mut Child, other: &mut Child, under: &str) {
    other.send(&format!("connect {under} c 20000"));
    survivor.ok(&format!("accept {under} c 20000"));
    assert!(matches!(other.receive(), Answer::Done(_)));
}

/// A survivor that has done everything once, and waits for whoever comes.
fn survivor(machine: &str, under: &str) -> (Child, Before) {
    let mut survivor = agent!(machine);
    survivor.ok("cache 0 0");
    survivor.ok(&format!("listen {under}"));
    let mut other = agent!(machine);
    other.ok("cache 0 0");
    connect(&mut survivor, &mut other, under);
    for (from, to) in [(0, 1), (1, 0)] {
        let [one, two] = [&mut survivor, &mut other];
        let (from, to) = if (from, to) == (0, 1) { (one, two) } else { (two, one) };
        from.share("warm 4096");
        from.ok("send c 100000 20000 of=warm drops=1 ready-on=0");
        assert_eq!(to.ok("receive c m 20000"), "100000 1");
        to.ok("open-received m warm place=stream:0");
        to.ok("touch warm");
        to.ok("drop warm");
        to.ok("discard m");
        let (sent, open, close) = (What::Bundle.share(from), What::Bundle.open("m warm"), "drop warm");
        from.ok(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
        assert_eq!(to.ok("receive c m 20000"), "5 1");
        to.ok(&open);
        to.ok(close);
        to.ok("discard m");
    }
    survivor.ok("drop-channel c");
    let before = survivor.census().of_kind("socket");
    drop(other);
    // Its channel, its link to our broker and ours to its.
    eventually("the first peer is forgotten", true, || survivor.census().of_kind("socket") <= before - 2);
    let mut settled = survivor.census();
    eventually("the survivor has settled", true, || {
        std::thread::sleep(Duration::from_millis(50));
        let now = survivor.census();
        let same = now == settled;
        settled = now;
        same
    });
    let before = Before::of(&mut survivor);
    (survivor, before)
}

/// Kills the other end at every point, round after round, under one survivor.
fn others_die(machine: &str) {
    let under = name(if machine == PINNING { "pinning" } else { "revoking" });
    let (mut survivor, before) = survivor(machine, &under);
    for point in kill_points("", "channel-") {
        for round in 0..kill_rounds(3) {
            let what = if round % 2 == 0 { What::Tensor } else { What::Bundle };
            let when = format!("{machine} {point} round {round}, a {what:?}");
            let mut victim = agent!(machine, dies_at: Some(point));
            victim.ok("cache 0 0");
            within(DEADLINE, &when, || one_dies(point, what, &under, &mut survivor, &mut victim));
            drop(victim);
            before.is_now(&when, &mut survivor);
        }
    }
}

fn one_dies(point: &str, what: What, under: &str, survivor: &mut Child, victim: &mut Child) {
    let (role, _) = point.split_once(':').expect("the role stands first");
    match role {
        "connector" => {
            victim.send(&format!("connect {under} c 20000"));
            if point == "connector:channel-welcomed" {
                survivor.ok(&format!("accept {under} c 20000"));
                return ends(survivor, "PeerGone");
            }
            victim.is_killed();
            // One that said hello may be accepted before its end is noticed.
            match survivor.ask(&format!("accept {under} c 200")) {
                Answer::Done(_) => ends(survivor, "PeerGone"),
                Answer::Failed(failure) => assert_eq!(failure.kind, "Timeout", "{}", failure.text),
                Answer::Ended(_) => panic!("the survivor survives"),
            }
        }
        "acceptor" => {
            let other = format!("{under}-victim");
            victim.ok(&format!("listen {other}"));
            victim.send(&format!("accept {other} c 20000"));
            match survivor.ask(&format!("connect {other} c 1000")) {
                Answer::Done(_) => ends(survivor, "PeerGone"),
                Answer::Failed(failure) => assert_eq!(failure.kind, "NobodyListens", "{}", failure.text),
                Answer::Ended(_) => panic!("the survivor survives"),
            }
            victim.is_killed();
        }
        "sender" => {
            connect(survivor, victim, under);
            survivor.ok("on-gone c");
            let sent = what.share(victim);
            victim.send(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
            victim.is_killed();
            assert_eq!(survivor.event("gone"), "gone c PeerGone");
            if ["sender:channel-put", "sender:channel-sent"].contains(&point) {
                assert_eq!(survivor.ok("receive c m 5000"), "5 1");
                let error = survivor.ask(&what.open("m x"));
                let gone = |failure: &str| matches!(failure, "ExporterGone" | "PeerGone");
                assert!(matches!(&error, Answer::Failed(failure) if gone(&failure.kind)), "{error:?}");
                survivor.ok("discard m");
            }
            ends(survivor, "PeerGone");
        }
        "receiver" => {
            connect(survivor, victim, under);
            let sent = what.share(survivor);
            if point == "receiver:channel-looked" {
                // What comes behind it goes by the socket.
                survivor.ok("send c 1 20000");
            }
            survivor.ok(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
            let open = what.open("m x");
            let commands: &[&str] = match point {
                "receiver:channel-received" => &["receive c m 20000"],
                "receiver:channel-looked" | "receiver:channel-sleeping" => {
                    &["receive c m 20000", "receive c n 20000"]
                }
                "receiver:channel-discarding" => &["receive c m 20000", "discard m"],
                _ => &["receive c m 20000", &open],
            };
            let (last, first) = commands.split_last().expect("there is one");
            first.iter().for_each(|command| drop(victim.ok(command)));
            victim.send(last);
            victim.is_killed();
            ends(survivor, "PeerGone");
        }
        "closer" => {
            connect(survivor, victim, under);
            let sent = what.share(survivor);
            survivor.ok(&format!("send c 5 20000 {sent} drops=1 ready-on=0"));
            victim.ok("send c 3 20000");
            victim.send("drop-channel c");
            victim.is_killed();
            // It had said that nothing more comes.
            assert_eq!(survivor.ok("receive c m 5000"), "3 0");
            survivor.ok("discard m");
            ends(survivor, "ChannelClosed");
        }
        other => panic!("no test for the points of the {other}"),
    }
}

/// Everything on the survivor's channel ends with this error.
fn ends(survivor: &mut Child, variant: &str) {
    within(ERROR_DEADLINE, "the error of a receive", || survivor.fails("receive c m 20000", variant));
    within(ERROR_DEADLINE, "the error of a send", || {
        eventually(
            "sends fail",
            true,
            || matches!(survivor.ask("send c 1 20000"), Answer::Failed(failure) if failure.kind == variant),
        );
    });
    survivor.ok("drop-channel c");
}

#[test]
fn whoever_dies_takes_nothing_along_where_importers_pin() {
    others_die(PINNING);
}

#[test]
fn whoever_dies_takes_nothing_along_where_exporters_revoke() {
    others_die(REVOKING);
}

// What an end says, from the words of docs/spec/channel.md.

#[derive(Serialize)]
struct Hello {
    program: String,
    backend: String,
    process: ProcessIdentity,
    devices: Vec<()>,
    map: Vec<()>,
    limit: u64,
}

fn hello() -> Hello {
    Hello {
        program: "raw".into(),
        backend: "mock".into(),
        process: ProcessIdentity::current().expect("/proc is there"),
        devices: Vec::new(),
        map: Vec::new(),
        limit: 1 << 20,
    }
}

fn greeting(version: u16, hello: &Hello) -> Vec<u8> {
    let mut packet = b"dipcchan".to_vec();
    packet.extend(version.to_le_bytes());
    packet.push(0);
    packet.extend(postcard::to_stdvec(hello).expect("it can be encoded"));
    packet
}

fn address(under: &str) -> Vec<u8> {
    format!("device-ipc.{}.{under}", rustix::process::geteuid().as_raw()).into_bytes()
}

/// A raw end whose hello has been answered, and its page.
fn greeted(child: &mut Child, under: &str) -> (Connection, OwnedFd) {
    let raw = Connection::to(&address(under)).expect("it listens");
    raw.send_bytes(&greeting(1, &hello()), &[]).expect("it reads");
    child.ok(&format!("accept {under} c 20000"));
    match raw.receive(DEADLINE) {
        Received::Packet(bytes, mut fds) => {
            assert_eq!(&bytes[..11], b"dipcchan\x01\x00\x00", "a hello of version 1");
            assert_eq!(fds.len(), 1, "the page of words");
            (raw, fds.remove(0))
        }
        other => panic!("no hello, but {other:?}"),
    }
}

fn file(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let file = memfd_create("raw", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file");
    rustix::io::pwrite(&file, bytes, 0).expect("it takes them");
    fcntl_add_seals(&file, seals).expect("it can be sealed");
    file
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// A varint of the wire format.
fn varint(number: u64) -> Vec<u8> {
    postcard::to_stdvec(&number).expect("it can be encoded")
}

#[test]
fn who_is_no_channel_or_another_version_is_told_apart_and_concerns_nobody_else() {
    let mut child = agent!(PINNING);
    let under = name("greetings");
    child.ok(&format!("listen {under}"));
    // Silent ones hold up nobody.
    let silent: Vec<_> = (0..3).map(|_| Connection::to(&address(&under)).expect("it listens")).collect();
    let raw = Connection::to(&address(&under)).expect("it listens");
    raw.send_bytes(b"GET / HTTP/1.1", &[]).expect("it reads");
    assert!(child.fails(&format!("accept {under} c 20000"), "Protocol").contains("no channel's"));
    let newer = Connection::to(&address(&under)).expect("it listens");
    newer.send_bytes(&greeting(2, &hello()), &[]).expect("it reads");
    let text = child.fails(&format!("accept {under} c 20000"), "Protocol");
    assert!(
        text.contains("version 2") && text.contains("version 1") && text.contains("in this process"),
        "{text}"
    );
    // It learns the version from the answer, whatever follows.
    match newer.receive(DEADLINE) {
        Received::Packet(bytes, _) => assert_eq!(&bytes[..10], b"dipcchan\x01\x00"),
        other => panic!("no answer, but {other:?}"),
    }
    let liar = Connection::to(&address(&under)).expect("it listens");
    let mut other = hello();
    other.process.pid = 1;
    liar.send_bytes(&greeting(1, &other), &[]).expect("it reads");
    assert!(child.fails(&format!("accept {under} c 20000"), "Protocol").contains("the kernel says"));
    let (raw, _page) = greeted(&mut child, &under);
    raw.send_bytes(&[0, 0, 0, 0, 0, 0, 1], &[]).expect("it reads");
    assert_eq!(child.ok("receive c m 20000"), "2 0");
    drop(silent);
}

/// Each of them breaks the channel off, with a reason, and nothing else.
#[test]
fn messages_that_are_none_break_the_channel_off() {
    let mut child = agent!(PINNING);
    let under = name("garbage");
    child.ok(&format!("listen {under}"));
    let mut sharing = agent!(PINNING);
    let third = sharing.share("x 4096");
    let bundle: BundleDescriptor =
        sharing.ok("share-blocks b 2 4096 devices=2").parse().expect("it is a bundle");
    drop(sharing);
    let bundle_with = |descriptor: &[u8], grants: u64| {
        // As above, and a bundle with so many grants.
        let descriptor = [varint(descriptor.len() as u64), descriptor.to_vec()].concat();
        let tokens = vec![7; 16 * grants as usize];
        [vec![0, 0, 0, 0, 1, 1], descriptor, varint(grants), tokens].concat()
    };
    let own = bundle_of_another(&bundle, &hello().process);
    let granted = {
        // Not a reply, ready, no grants that are over, one tensor with a grant, of another process.
        let mut packet = vec![0, 0, 0, 0, 1, 0];
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
        (vec![9, 9, 9], vec![], "no message"),
        (head(1 << 40), vec![], "no head"),
        (head(1025), vec![], "no head"),
        (granted, vec![], "another process shares"),
        (bundle_with(&bundle.to_bytes(), 2), vec![], "another process shares"),
        (bundle_with(&own, 0), vec![], "other than all of a bundle"),
        (bundle_with(&own, 1), vec![], "other than all of a bundle"),
        (bundle_with(&own, 3), vec![], "other than all of a bundle"),
        (bundle_with(&own, 65), vec![], "no head"),
        (bundle_with(&own[..own.len() - 1], 2), vec![], "no head"),
        ([vec![0, 0], varint(1 << 62), vec![0, 0]].concat(), vec![], "value that no word has"),
        (head(0), vec![file(b"x", SEALS)], "does not speak of"),
        (in_file(1 << 40), vec![file(b"x", SEALS)], "agreed on"),
        (in_file(4), vec![file(&empty, SealFlags::SHRINK)], "not a sealed memory file"),
        (in_file(4), vec![file(&[0; 5], SEALS)], "other than 4 bytes"),
        (in_file(4), vec![file(&empty, SEALS), file(&empty, SEALS)], "2 descriptors for one"),
        (in_file(3), vec![file(&[0xff; 3], SEALS)], "no head"),
        ([in_file(4), vec![0]].concat(), vec![file(&empty, SEALS)], "follows the size"),
        (vec![2, 0], vec![], "follows its end"),
        (vec![3, 0], vec![], "follows its word"),
        (vec![3], vec![file(b"x", SEALS)], "does not speak of"),
        (vec![0; 70_000], vec![], "larger than packets"),
        (vec![0; 200_000], vec![], "larger than packets"),
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
    // One tensor with a grant, of this process: not a reply, ready, no grants that are over.
    let with_grant = |descriptor: &Descriptor, grant: [u8; 16]| {
        let bytes = descriptor.to_bytes();
        [vec![0, 0, 0, 0, 1, 0], varint(bytes.len() as u64), bytes, vec![1], grant.to_vec()].concat()
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
    assert_eq!(within(ERROR_DEADLINE, "the sender", || sender.receive()), Answer::Done(String::new()));
    // What the peer has not received when it closes will never be received.
    let (mut sender, mut receiver) = (agent!(PINNING), agent!(PINNING));
    receiver.ok(&format!("listen {under}-2"));
    connect(&mut receiver, &mut sender, &format!("{under}-2"));
    sender.share("x 4096");
    sender.ok("send c 5 20000 of=x");
    sender.send("close-channel c 15000");
    sender.says_nothing_for(Duration::from_millis(50));
    receiver.ok("drop-channel c");
    match within(ERROR_DEADLINE, "the sender", || sender.receive()) {
        Answer::Failed(failure) => assert_eq!(failure.kind, "ChannelClosed", "{failure:?}"),
        other => panic!("{other:?}"),
    }
}

/// A message whose file does not come, as nobody sent one, is lost alone: this process may have no descriptors left.
#[test]
fn a_message_that_lost_its_file_is_lost_alone() {
    let mut child = agent!(PINNING);
    let under = name("lost");
    child.ok(&format!("listen {under}"));
    let (raw, _page) = greeted(&mut child, &under);
    raw.send_bytes(&[1, 4], &[]).expect("it reads");
    raw.send_bytes(&[0, 0, 0, 0, 0, 0], &[]).expect("it reads");
    assert!(child.fails("receive c m 20000", "Io").contains("ulimit -n"));
    assert_eq!(child.ok("receive c m 20000"), "1 0");
}

/// A message of these bytes alone, without a packet.
fn message(bytes: &[u8]) -> Vec<u8> {
    [&[0, 0, 0, 0], bytes].concat()
}

/// The page of a channel whose listening end is the child, by its file: what the connecting end does with it.
struct RawPage(OwnedFd);

impl RawPage {
    const INBOX: u64 = 32_768;
    const LONGEST: usize = 4032;

    fn write(&self, at: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.0, bytes, at).expect("it is a file"), bytes.len());
    }

    fn read(&self, at: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        assert_eq!(rustix::io::pread(&self.0, &mut bytes, at).expect("it is a file"), count);
        bytes
    }

    fn number(&self, at: u64) -> u64 {
        u64::from_ne_bytes(self.read(at, 8).try_into().expect("eight bytes"))
    }

    /// The connecting end's word of a slot.
    fn say(&self, slot: u64, value: u64) {
        self.write(slot * 256 + 128, &value.to_ne_bytes());
    }

    /// Into the listening end's inbox.
    fn put(&self, number: u64, length: u64, message: &[u8]) {
        self.write(Self::INBOX + 64, message);
        self.write(Self::INBOX + 8, &length.to_ne_bytes());
        self.write(Self::INBOX, &number.to_ne_bytes());
    }

    /// Out of the connecting end's.
    fn take(&self) -> (u64, Vec<u8>) {
        let inbox = Self::INBOX + 4096;
        (self.number(inbox), self.read(inbox + 64, self.number(inbox + 8) as usize))
    }
}

const SENT: u64 = 4;
const TAKEN: u64 = 5;
const AWAKE: u64 = 6;

/// A child that stands still at a point of the protocol, with a raw end and its page.
fn standing(
    point: &str,
    name_of_it: &str,
    command: &str,
    before: impl FnOnce(&RawPage),
) -> (Child, Connection, RawPage) {
    let point = format!("{point}!stop");
    let mut child = agent!(PINNING, dies_at: Some(&point));
    let under = name(name_of_it);
    child.ok(&format!("listen {under}"));
    let (raw, page) = greeted(&mut child, &under);
    let page = RawPage(page);
    before(&page);
    child.send(command);
    child.has_stopped();
    (child, raw, page)
}

#[test]
fn a_message_that_is_put_there_as_the_receiver_falls_asleep_is_found() {
    // For less than the second after which it would look again.
    let receive = "receive c m 900";
    let (mut child, _raw, page) = standing("receiver:channel-sleeping", "asleep", receive, |_| {});
    assert_eq!(page.number(AWAKE * 256 + 64), 1, "whoever puts it there now wakes nobody");
    page.put(1, 5, &message(&[0]));
    child.resume();
    assert_eq!(child.receive(), Answer::Done("1 0".into()));
}

#[test]
fn a_receiver_that_falls_asleep_as_a_message_is_put_there_is_woken() {
    let awake = |page: &RawPage| page.say(AWAKE, 1);
    let (mut child, raw, page) = standing("sender:channel-put", "woken", "send c 2 20000", awake);
    page.say(AWAKE, 0);
    child.resume();
    assert_eq!(child.receive(), Answer::Done(String::new()));
    assert!(matches!(raw.receive(DEADLINE), Received::Packet(bytes, _) if bytes == [3]));
    assert_eq!(page.take(), (1, message(&[0, 1])));
}

#[test]
fn a_packet_does_not_overtake_the_message_that_was_put_there_before_it() {
    let said = |page: &RawPage| page.say(SENT, 1);
    let receive = "receive c m 20000";
    let (mut child, raw, page) = standing("receiver:channel-looked", "overtaken", receive, said);
    page.put(1, 5, &message(&[0]));
    raw.send_bytes(&[vec![0], message(&[0, 1])].concat(), &[]).expect("it reads");
    child.resume();
    assert_eq!(child.receive(), Answer::Done("1 0".into()));
    assert_eq!(child.ok("receive c m 20000"), "2 0");
    // Nor does the end.
    let (mut child, raw, page) = standing("receiver:channel-looked", "ended", receive, said);
    page.put(1, 5, &message(&[0]));
    drop(raw);
    child.resume();
    assert_eq!(child.receive(), Answer::Done("1 0".into()));
    child.fails("receive c m 20000", "PeerGone");
}

#[test]
fn messages_come_in_their_order_by_the_inbox_and_by_the_socket() {
    let mut child = agent!(PINNING);
    let under = name("inbox");
    child.ok(&format!("listen {under}"));
    let (raw, page) = greeted(&mut child, &under);
    let page = RawPage(page);
    let packet = |bytes: &[u8]| [vec![0], message(bytes)].concat();
    let put = |number, bytes: &[u8]| page.put(number, message(bytes).len() as u64, &message(bytes));
    put(1, &[0]);
    raw.send_bytes(&packet(&[0, 1]), &[]).expect("it reads");
    raw.send_bytes(&packet(&[0, 1, 2]), &[]).expect("it reads");
    assert_eq!(child.ok("receive c m 20000"), "1 0");
    assert_eq!(page.number(TAKEN * 256 + 64), 1, "it says what it has taken");
    put(4, &[0, 1, 2, 3]);
    for expected in ["2 0", "3 0", "4 0"] {
        assert_eq!(child.ok("receive c m 20000"), expected);
    }
    // A number that is not the next one says nothing; a receiver that sleeps is woken by the socket.
    put(7, &[0]);
    assert!(child.fails("receive c m 50", "Timeout").contains("still there"));
    child.send("receive c m 20000");
    eventually("it sleeps", 0, || page.number(AWAKE * 256 + 64));
    put(5, &[]);
    raw.send_bytes(&[3], &[]).expect("it reads");
    assert_eq!(child.receive(), Answer::Done("0 0".into()));
    // What nobody says to be awake gets, it gets by the socket.
    child.ok("send c 1 20000");
    assert!(matches!(raw.receive(DEADLINE), Received::Packet(bytes, _) if bytes == packet(&[0])));
    page.say(AWAKE, 1);
    child.ok("send c 2 20000");
    assert_eq!(page.take(), (2, message(&[0, 1])));
    child.ok("send c 3 20000");
    assert!(matches!(raw.receive(DEADLINE), Received::Packet(bytes, _) if bytes == packet(&[0, 1, 2])));
    page.say(TAKEN, 2);
    child.ok("send c 4 20000");
    assert_eq!(page.take(), (4, message(&[0, 1, 2, 3])));
    page.say(TAKEN, 4);
    child.ok("send c 5000 20000");
    assert!(matches!(raw.receive(DEADLINE), Received::Packet(bytes, _) if bytes.len() == 5005));
}

#[test]
fn an_inbox_with_no_message_in_it_breaks_the_channel_off() {
    let mut child = agent!(PINNING);
    let under = name("lies");
    child.ok(&format!("listen {under}"));
    let longest = RawPage::LONGEST as u64;
    let cases: [(u64, Vec<u8>, &str); 5] = [
        (longest + 1, message(&[]), "longer than an inbox"),
        (u64::MAX, message(&[]), "longer than an inbox"),
        (3, vec![0xff; 3], "no head"),
        (0, vec![], "no head"),
        (longest, vec![0xff; RawPage::LONGEST], "no head"),
    ];
    for (length, bytes, why) in cases {
        let (raw, page) = greeted(&mut child, &under);
        RawPage(page).put(1, length, &bytes);
        let text = child.fails("receive c m 20000", "Protocol");
        assert!(text.contains(why), "{why}: {text}");
        assert_eq!(child.fails("receive c m 20000", "Protocol"), text, "it stays so");
        raw.is_closed_within(DEADLINE);
        child.ok("drop-channel c");
    }
    // One that says again and again that there is something keeps nobody longer than it wants to wait.
    let (raw, page) = greeted(&mut child, &under);
    let page = RawPage(page);
    (0..65).for_each(|_| raw.send_bytes(&[3], &[]).expect("it reads"));
    raw.send_bytes(&[vec![0], message(&[0])].concat(), &[]).expect("it reads");
    page.say(SENT, 1);
    child.fails("receive c m 0", "Timeout");
    assert_eq!(child.ok("receive c m 0"), "1 0", "a few that stand before a message are passed over");
}

/// A forked child that stays; killed, and reaped by whoever its parent leaves it to.
struct Stray(Pid);

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

/// A forked child has copies of nothing: the channel ends with its parent, and in the child every call says so.
#[test]
fn a_forked_child_keeps_no_channel_open() {
    let mut near = agent!(PINNING);
    let mut far = agent!(PINNING);
    let under = name("fork");
    near.ok(&format!("listen {under}"));
    connect(&mut near, &mut far, &under);
    near.share("x 4096");
    near.ok("send c 3 20000 of=x");
    assert_eq!(far.ok("receive c m 20000"), "3 1");
    far.ok("listen far");
    let _stray = Stray(far.ok("fork").parse().ok().and_then(Pid::from_raw).expect("it is a process"));
    let events = far.take_events();
    for what in ["listen", "connect", "accept", "reply", "open-received", "send", "receive", "close-channel"]
    {
        let told = format!("child {what} Forked");
        assert!(events.contains(&told), "{told} is not among {events:?}");
    }
    // The parent's goes on, and ends with it, though the child lives.
    far.ok("send c 4 20000");
    assert_eq!(near.ok("receive c m 20000"), "4 0");
    far.kill();
    near.fails("receive c m 20000", "PeerGone");
}

/// A name that another user has taken is noticed before anything is said.
#[test]
fn a_squatter_is_told_nothing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs to be root to become somebody else");
        return;
    }
    let (mut squatter, mut victim) = (agent!(PINNING), agent!(PINNING));
    let under = name("squat");
    squatter.ok("become 65534 65534");
    squatter.ok(&format!("squat {under}"));
    let text = victim.fails(&format!("connect {under} c 1000"), "NotPermitted");
    assert!(text.contains("user 65534") && text.contains("IpcBuilder::allow"), "{text}");
    assert_eq!(squatter.ok("squatted"), "0");
    // Whoever is allowed on both sides is let in.
    let (mut stranger, mut allowing) = (agent!(PINNING), agent!(PINNING));
    stranger.ok("become 65534 65534");
    stranger.ok("ipc allow-uid=0");
    stranger.ok(&format!("listen {under}"));
    stranger.send(&format!("accept {under} c 20000"));
    victim.fails(&format!("connect {under} c 1000 user=65534"), "NotPermitted");
    allowing.ok("ipc allow-uid=65534");
    allowing.ok(&format!("connect {under} c 20000 user=65534"));
    assert!(matches!(stranger.receive(), Answer::Done(_)));
    allowing.ok("send c 2 1000");
    assert_eq!(stranger.ok("receive c m 20000"), "2 0");
}

/// A user who is not allowed is told so, and the listener goes on waiting.
#[test]
fn a_stranger_is_not_let_in() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs to be root to become somebody else");
        return;
    }
    let (mut listener, mut stranger, mut friend) = (agent!(PINNING), agent!(PINNING), agent!(PINNING));
    let under = name("stranger");
    listener.ok(&format!("listen {under}"));
    stranger.ok("become 65534 65534");
    stranger.ok("ipc allow-uid=0");
    listener.send(&format!("accept {under} c 20000"));
    let text = stranger.fails(&format!("connect {under} c 5000 user=0"), "NotPermitted");
    assert!(text.contains("does not allow user 65534"), "{text}");
    friend.ok(&format!("connect {under} c 20000"));
    assert_eq!(listener.receive(), Answer::Done(friend.id().to_string()));
}

/// In a directory the socket is a file: one that a dead process left is taken over, a living one's is not, and it goes with
/// its listener.
#[test]
fn a_file_of_a_dead_listener_is_no_obstacle() {
    let directory = std::env::temp_dir().join(name("directory"));
    std::fs::create_dir(&directory).expect("it is new");
    let settings = format!("ipc directory={}", directory.display());
    let (mut first, mut second, mut client) = (agent!(PINNING), agent!(PINNING), agent!(PINNING));
    for child in [&mut first, &mut second, &mut client] {
        child.ok(&settings);
    }
    first.ok("listen files");
    let text = second.fails("listen files", "ChannelNameInUse");
    assert!(text.contains(&first.id().to_string()), "{text}");
    first.kill();
    second.ok("listen files");
    client.send("connect files c 20000");
    second.ok("accept files c 20000");
    assert_eq!(client.receive(), Answer::Done(second.id().to_string()));
    second.ok("unlisten files");
    let left: Vec<_> = std::fs::read_dir(&directory).expect("it is there").flatten().collect();
    assert!(left.iter().all(|entry| !entry.file_name().to_string_lossy().contains("files")), "{left:?}");
    std::fs::remove_dir_all(&directory).expect("it can be removed");
}
