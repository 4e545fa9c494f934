//! Messages in the inbox of the shared page, around the moment at which the receiver falls asleep.

use std::os::fd::OwnedFd;

use device_ipc_broker_tests::{Answer, Child, DEADLINE, PINNING, Received, agent, eventually};
use device_ipc_core::Ipc;
use device_ipc_mock::MockBackend;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

use super::name;
use super::raw::{RawPeer, greeted};

/// A message of these bytes alone, without a packet.
fn message(bytes: &[u8]) -> Vec<u8> {
    [&[0, 0, 0, 0], bytes].concat()
}

/// The page of a channel, by its file, as the connecting peer of an agent uses it.
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

    /// Writes the connecting peer's counter of a slot.
    fn say(&self, slot: u64, value: u64) {
        self.write(slot * 256 + 128, &value.to_ne_bytes());
    }

    /// Writes to the listening peer's inbox.
    fn put(&self, number: u64, length: u64, message: &[u8]) {
        self.write(Self::INBOX + 64, message);
        self.write(Self::INBOX + 8, &length.to_ne_bytes());
        self.write(Self::INBOX, &number.to_ne_bytes());
    }

    /// Reads from the connecting peer's inbox.
    fn take(&self) -> (u64, Vec<u8>) {
        let inbox = Self::INBOX + 4096;
        (self.number(inbox), self.read(inbox + 64, self.number(inbox + 8) as usize))
    }
}

const RECEIVED: u64 = 2;
const SENT: u64 = 4;
const TAKEN: u64 = 5;
const AWAKE: u64 = 6;
const WANTS_ROOM: u64 = 7;

/// An agent that is stopped at a point of the protocol, with a raw peer and its page.
fn standing(
    point: &str,
    name_of_it: &str,
    command: &str,
    before: impl FnOnce(&RawPage),
) -> (Child, RawPeer, RawPage) {
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
fn message_written_as_the_receiver_falls_asleep_is_found() {
    // For less than the second after which it would look again.
    let receive = "receive c m 900";
    let (mut child, _raw, page) = standing("receiver:channel-sleeping", "asleep", receive, |_| {});
    assert_eq!(page.number(AWAKE * 256 + 64), 1, "whoever puts it there now wakes nobody");
    page.put(1, 5, &message(&[0]));
    child.resume();
    assert_eq!(child.receive(), Answer::Done("1 0".into()));
}

#[test]
fn receiver_that_falls_asleep_as_a_message_is_written_wakes() {
    let awake = |page: &RawPage| page.say(AWAKE, 1);
    let (mut child, raw, page) = standing("sender:channel-put", "woken", "send c 2 20000", awake);
    page.say(AWAKE, 0);
    child.resume();
    assert_eq!(child.receive(), Answer::Done(String::new()));
    assert!(matches!(raw.receive(DEADLINE), Received::Packet(bytes, _) if bytes == [3]));
    assert_eq!(page.take(), (1, message(&[0, 1])));
}

#[test]
fn packet_does_not_overtake_an_earlier_inbox_message() {
    let said = |page: &RawPage| page.say(SENT, 1);
    let receive = "receive c m 20000";
    let (mut child, raw, page) = standing("receiver:channel-looked", "overtaken", receive, said);
    page.put(1, 5, &message(&[0]));
    raw.send_bytes(&[vec![0], message(&[0, 1])].concat(), &[]).expect("it reads");
    child.resume();
    assert_eq!(child.receive(), Answer::Done("1 0".into()));
    assert_eq!(child.ok("receive c m 20000"), "2 0");
    // Nor does the close.
    let (mut child, raw, page) = standing("receiver:channel-looked", "ended", receive, said);
    page.put(1, 5, &message(&[0]));
    drop(raw);
    child.resume();
    assert_eq!(child.receive(), Answer::Done("1 0".into()));
    child.fails("receive c m 20000", "PeerGone");
}

#[test]
fn messages_by_inbox_and_socket_arrive_in_order() {
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
    assert!(child.fails("receive c m 50", "Timeout").contains("still connected"));
    child.send("receive c m 20000");
    eventually("it sleeps", 0, || page.number(AWAKE * 256 + 64));
    put(5, &[]);
    raw.send_bytes(&[3], &[]).expect("it reads");
    assert_eq!(child.receive(), Answer::Done("0 0".into()));
    // A peer that does not report to be awake receives by the socket.
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

/// A peer that never acknowledges fills the channel; one that acknowledges too much, or takes it back, changes only the count.
#[test]
fn false_acknowledgements_neither_block_nor_end_the_sender() {
    const LIMIT: u64 = 128;
    let mut child = agent!(PINNING);
    let under = name("acknowledge");
    child.ok(&format!("listen {under}"));
    let (raw, page) = greeted(&mut child, &under);
    let page = RawPage(page);
    let fill = |child: &mut Child, count: u64| (0..count).for_each(|_| drop(child.ok("send c 1 20000")));
    let full = |child: &mut Child| {
        let text = child.fails("send c 1 0", "Timeout");
        assert!(text.contains("has not received 128 messages"), "{text}");
    };
    fill(&mut child, LIMIT);
    full(&mut child);
    let wanted = |page: &RawPage| page.number(WANTS_ROOM * 256 + 64);
    assert_eq!(wanted(&page), 1);
    // Wake-ups without room are spurious, and a flood of them blocks no thread.
    let wake = || rustix::net::send(&raw.control, b"x", SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok();
    while wake() {}
    child.fails("send c 1 50", "Timeout");
    child.send("send c 1 20000");
    eventually("the wake-ups are read", true, wake);
    page.say(RECEIVED, 1);
    assert!(wake());
    assert_eq!(child.receive(), Answer::Done(String::new()));
    full(&mut child);
    // Everything and more.
    page.say(RECEIVED, u64::MAX);
    fill(&mut child, 3);
    page.say(RECEIVED, 0);
    fill(&mut child, LIMIT - 1);
    full(&mut child);
    page.say(RECEIVED, 1);
    full(&mut child);
    // A sleeping sender notices the end of the control socket.
    child.send("send c 1 20000");
    drop(raw);
    assert!(matches!(child.receive(), Answer::Failed(failure) if failure.kind == "PeerGone"));
}

#[test]
fn inbox_without_a_message_closes_the_channel() {
    let mut child = agent!(PINNING);
    let under = name("lies");
    child.ok(&format!("listen {under}"));
    let longest = RawPage::LONGEST as u64;
    let cases: [(u64, Vec<u8>, &str); 5] = [
        (longest + 1, message(&[]), "longer than an inbox"),
        (u64::MAX, message(&[]), "longer than an inbox"),
        (3, vec![0xff; 3], "head of its message cannot be decoded"),
        (0, vec![], "head of its message cannot be decoded"),
        (longest, vec![0xff; RawPage::LONGEST], "head of its message cannot be decoded"),
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
    // A peer that repeatedly announces a message delays a receiver no longer than its timeout.
    let (raw, page) = greeted(&mut child, &under);
    let page = RawPage(page);
    (0..65).for_each(|_| raw.send_bytes(&[3], &[]).expect("it reads"));
    raw.send_bytes(&[vec![0], message(&[0])].concat(), &[]).expect("it reads");
    page.say(SENT, 1);
    child.fails("receive c m 0", "Timeout");
    assert_eq!(child.ok("receive c m 0"), "1 0", "a few that stand before a message are passed over");
}

/// A message that came without a packet is not seen by who waits for the socket alone.
#[test]
fn descriptor_of_a_receiver_that_is_awake_shows_a_message_of_the_inbox() {
    let under = name("first-use");
    let mut sender = agent!(PINNING);
    let ipc = Ipc::with_backend(MockBackend::from_spec(PINNING).expect("a machine"));
    let listener = ipc.listen(&under).start().expect("the name is free");
    sender.send(&format!("connect {under} c 20000"));
    let receiver = listener.accept(DEADLINE).expect("it connects");
    assert!(matches!(sender.receive(), Answer::Done(_)));
    sender.ok("send c 1 20000");
    assert_eq!(receiver.receive(DEADLINE).expect("it has sent one").bytes().len(), 1);
    sender.ok("send c 2 20000");
    let is_readable = || {
        let mut events = [PollFd::new(&receiver, PollFlags::IN)];
        poll(&mut events, Some(&Timespec::default())).expect("it can be polled") == 1
    };
    assert!(is_readable(), "at its first use");
    assert_eq!(receiver.try_receive().expect("it is open").map(|message| message.bytes().len()), Some(2));
    assert!(!is_readable());
    sender.ok("send c 3 20000");
    assert!(is_readable());
}
