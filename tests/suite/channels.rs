//! Channels of two processes from the view of threads, event loops and a tokio runtime: readiness, limits, closing, cancellation.
//!
//! The module `channels_tcp` runs these tests once more over TCP.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::changes::{ipc, is_readable, is_readable_now, tensor, wait};
use super::roles::{argument, start};
use device_ipc::{
    Channel, ConnectBuilder, Error, Export, Ipc, Key, ListenBuilder, Listener, Message, Stream, TrySendError,
};
use device_ipc_test_process::{Process, alone, answer, serve};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const TIMEOUT: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;

fn kind(error: &Error) -> String {
    format!("{error:?}").split(['{', '(', ' ']).next().expect("a name").to_owned()
}

/// Returns whether the channels of these tests are those of other hosts.
fn is_over_tcp() -> bool {
    module_path!().ends_with("channels_tcp")
}

fn key() -> Key {
    Key::new(b"the key of the channel tests").unwrap()
}

/// Starts a listener. Returns the name to which peers connect.
fn listen(
    ipc: &Ipc,
    name: &str,
    limits: impl FnOnce(ListenBuilder<'_>) -> ListenBuilder<'_>,
) -> (Listener, String) {
    if is_over_tcp() {
        let listener = limits(ipc.listen_tcp("127.0.0.1:0", &key())).start().expect("a free port");
        let address = listener.address();
        return (listener, address);
    }
    let name = format!("channels-{}-{name}", std::process::id());
    (limits(ipc.listen(&name)).start().expect("the name is new"), name)
}

/// Returns whether a descriptor is readable: now, or soon if the cause comes from another host.
fn is_readable_by_now(source: &impl AsFd) -> bool {
    is_readable(source, if is_over_tcp() { TIMEOUT } else { Duration::ZERO })
}

/// Connects this process with a new peer.
fn connect(
    name: &str,
    limits: impl FnOnce(ListenBuilder<'_>) -> ListenBuilder<'_>,
) -> (Ipc, Channel, Process) {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, name, limits);
    let peer = start(module_path!(), "peer", &[("NAME", &name)]);
    let channel = listener.accept(TIMEOUT).expect("the peer connects");
    (ipc, channel, peer)
}

/// Not a test: the process that a test starts.
#[test]
#[ignore = "started by the tests"]
fn role() {
    let (ipc, name) = (ipc(), argument("NAME"));
    let key = key();
    let connecting: ConnectBuilder<'_> =
        if is_over_tcp() { ipc.connect_tcp(&name, &key) } else { ipc.connect(&name) };
    let channel = connecting.timeout(TIMEOUT).start().expect("the test listens");
    let mut channel = Some(channel);
    serve(|command, argument| {
        carry_out(&ipc, &mut channel, command, argument).unwrap_or_else(|error| kind(&error))
    });
}

fn carry_out(
    ipc: &Ipc,
    channel: &mut Option<Channel>,
    command: &str,
    argument: &str,
) -> Result<String, Error> {
    let open = || channel.as_ref().expect("the channel is open");
    match command {
        "receive" => {
            let received = open().receive(TIMEOUT)?;
            return Ok(String::from_utf8_lossy(received.bytes()).into_owned());
        }
        "receive-all" => {
            for _ in 0..argument.parse::<u64>().expect("a number") {
                open().receive(TIMEOUT)?;
            }
        }
        "send" => open().send(Message::new().bytes(argument.as_bytes()), TIMEOUT)?,
        "send-numbers" => {
            for number in 0..argument.parse::<u64>().expect("a number") {
                open().send(Message::new().bytes(number.to_string().into_bytes()), TIMEOUT)?;
            }
        }
        "fill" => fill(open(), argument.parse().expect("a number")),
        "read-received" => {
            let received = open().receive(TIMEOUT)?;
            let stream = ipc.create_stream(0)?;
            let mapping = received.exports()[0].open().on(&stream)?;
            answer("opened");
            let bytes = mapping.to_host_bytes(&stream)?;
            received.check()?;
            return Ok(format!("{} of {}", bytes.iter().filter(|byte| **byte == 7).count(), bytes.len()));
        }
        "close" => *channel = None,
        other => panic!("unknown command {other:?}"),
    }
    Ok("done".into())
}

/// Sends messages until the channel is full, which it is after this number of them.
fn fill(channel: &Channel, expected: u64) {
    // The receipts of another host are on their way.
    let timeout = if is_over_tcp() { TIMEOUT } else { Duration::ZERO };
    for sent in 0..expected {
        let result = channel.send(Message::new().bytes(b"x"), timeout);
        assert!(result.is_ok(), "{sent} of {expected}: {result:?}");
    }
    let full = channel.try_send(Message::new().bytes(b"x"));
    let Err(TrySendError::Full(message)) = full else { panic!("more than {expected}: {full:?}") };
    assert_eq!(message.payload(), b"x");
}

#[test]
fn messages_in_flight_stay_within_the_default_limit() {
    let (_ipc, channel, mut peer) = connect("default", |builder| builder);
    fill(&channel, 128);
    let late = channel.send(Message::new(), Duration::from_millis(20)).expect_err("it is full");
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    assert!(late.to_string().contains("128 messages"), "{late}");
    assert_eq!(peer.ask("receive-all 3"), "done");
    fill(&channel, 3);
}

#[test]
fn pinned_memory_of_a_slow_reader_stays_within_the_limit() {
    // The counter is that of the whole process.
    alone!();
    let (ipc, channel, mut peer) = connect("pinned", |builder| builder.max_bytes_in_flight(8 * MIB));
    let send = |timeout| channel.send(Message::new().export(tensor(&ipc, MIB)), timeout);
    let pinned = || device_ipc::counters().exported_bytes;
    let before = pinned();
    let sent = (0..100).take_while(|_| send(Duration::from_millis(1)).is_ok()).count();
    assert_eq!(sent, 8);
    wait("refused exports are freed", || pinned() <= before + 8 * MIB);
    // Each receipt makes room for one message; what the peer discards is freed.
    for _ in 0..16 {
        assert_eq!(peer.ask("receive"), "");
        send(TIMEOUT).expect("there is room");
        assert!(send(Duration::ZERO).is_err());
    }
    wait("received messages are freed", || pinned() <= before + 8 * MIB);
    // A message above the limit waits until it is the only one.
    let large = || channel.try_send(Message::new().export(tensor(&ipc, 9 * MIB)));
    assert!(matches!(large(), Err(TrySendError::Full(_))));
    assert_eq!(peer.ask("receive-all 8"), "done");
    wait("no other message is in flight", || large().is_ok());
    assert!(matches!(channel.try_send(Message::new()), Err(TrySendError::Full(_))));
}

#[test]
fn senders_descriptor_is_readable_when_the_peer_made_room() {
    let (_ipc, channel, mut peer) = connect("room", |builder| builder.max_messages_in_flight(2));
    let (sender, receiver) = channel.split();
    assert!(!is_readable_now(&sender));
    for _ in 0..2 {
        sender.try_send(Message::new()).expect("there is room");
    }
    for _ in 0..100 {
        let full = sender.try_send(Message::new().bytes(b"kept".to_vec()));
        let Err(TrySendError::Full(message)) = full else { panic!("{full:?}") };
        assert!(!is_readable_now(&sender), "there is no room");
        peer.send("receive");
        assert!(is_readable(&sender, TIMEOUT), "the peer wakes the sender");
        sender.try_send(message).expect("there is room");
        peer.receive();
    }
    // A large message fills the socket before the limit.
    assert!(!is_readable_now(&receiver));
    drop(receiver);
}

#[test]
fn full_socket_blocks_no_sender_longer_than_the_peer() {
    let (_ipc, channel, mut peer) = connect("socket", |builder| builder.max_messages_in_flight(1000));
    let large = vec![7_u8; 60_000];
    let mut sent = 0;
    while channel.try_send(Message::new().bytes(&large)).is_ok() {
        sent += 1;
    }
    assert!(sent < 1000, "the kernel's buffer is smaller");
    peer.send(&format!("receive-all {}", sent + 50));
    for _ in 0..50 {
        channel.send(Message::new().bytes(&large), TIMEOUT).expect("the peer receives");
    }
    assert_eq!(peer.receive(), "done");
}

#[test]
fn both_full_directions_drain_when_either_process_receives() {
    let (_ipc, channel, mut peer) = connect("both", |builder| builder.max_messages_in_flight(10));
    assert_eq!(peer.ask("fill 128"), "done");
    fill(&channel, 10);
    assert!(channel.send(Message::new(), Duration::from_millis(10)).is_err(), "both wait");
    for _ in 0..128 {
        channel.receive(TIMEOUT).expect("a message");
    }
    assert_eq!(peer.ask("receive-all 10"), "done");
    fill(&channel, 10);
    assert_eq!(peer.ask("fill 128"), "done");
}

#[test]
fn receivers_descriptor_is_readable_until_nothing_is_left() {
    let (_ipc, channel, mut peer) = connect("readable", |builder| builder);
    assert!(channel.try_receive().expect("it is open").is_none());
    // The inbox has a message before the descriptor is used, and its sender makes no system call.
    assert_eq!(peer.ask("send inbox"), "done");
    assert_eq!(peer.ask("send socket"), "done");
    assert!(is_readable(&channel, TIMEOUT) && is_readable_now(&channel));
    let next = || channel.try_receive().expect("it is open").map(|received| received.bytes().to_vec());
    assert_eq!(next().as_deref(), Some(&b"inbox"[..]));
    assert!(is_readable_by_now(&channel));
    assert_eq!(next().as_deref(), Some(&b"socket"[..]));
    assert_eq!(next(), None);
    assert!(!is_readable_now(&channel));
    // After every wait, also one by a thread, each message makes the descriptor readable.
    for round in 0..50 {
        peer.send(&format!("send {round}"));
        assert!(is_readable(&channel, TIMEOUT));
        if round % 2 == 0 {
            assert!(next().is_some());
        } else {
            channel.receive(TIMEOUT).expect("a message");
        }
        assert_eq!(peer.receive(), "done");
        assert!(!is_readable_now(&channel));
    }
    assert_eq!(peer.ask("close"), "done");
    assert!(is_readable(&channel, TIMEOUT));
    assert!(matches!(channel.try_receive(), Err(Error::ChannelClosed { .. })));
    assert!(is_readable_now(&channel), "the end stays");
}

#[test]
fn message_in_the_inbox_makes_a_new_descriptor_readable() {
    let (_ipc, channel, mut peer) = connect("inbox", |builder| builder);
    assert_eq!(peer.ask("send one"), "done");
    assert!(is_readable_by_now(&channel), "nothing else would announce it");
    assert_eq!(channel.try_receive().expect("open").expect("a message").bytes(), b"one");
    assert!(!is_readable_now(&channel));
}

#[test]
fn cancelled_waits_lose_no_message() {
    let (_ipc, channel, mut peer) = connect("cancel", |builder| builder);
    const COUNT: u64 = 2000;
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(async {
        let channel = watch(channel);
        peer.send(&format!("send-numbers {COUNT}"));
        let (mut next, mut cancelled) = (0, 0);
        while next < COUNT {
            let attempt = tokio::time::timeout(Duration::from_micros(next % 3 * 20), async {
                loop {
                    // Cancelled between the readiness and the receive, in some rounds.
                    channel.readable().await.expect("it is watched").clear_ready();
                    tokio::task::yield_now().await;
                    if let Some(received) = channel.get_ref().try_receive().expect("it is open") {
                        return received;
                    }
                }
            });
            match attempt.await {
                Ok(received) => {
                    assert_eq!(received.bytes(), next.to_string().as_bytes());
                    next += 1;
                }
                Err(_) => {
                    cancelled += 1;
                    // A task whose wait was cancelled asks again before it waits.
                    if let Some(received) = channel.get_ref().try_receive().expect("it is open") {
                        assert_eq!(received.bytes(), next.to_string().as_bytes());
                        next += 1;
                    }
                }
            }
        }
        assert!(cancelled > 0, "no wait was cancelled");
    });
    assert_eq!(peer.receive(), "done");
}

#[test]
fn event_loop_connects_without_waiting() {
    let ipc = ipc();
    if is_over_tcp() {
        let refused = ipc.connect_tcp("127.0.0.1:1", &key()).try_start().map(drop);
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
        return;
    }
    let name = format!("channels-{}-connecting", std::process::id());
    let nobody = ipc.connect(&name).try_start().map(drop);
    assert!(matches!(nobody, Err(Error::NoListener { after: Duration::ZERO, .. })), "{nobody:?}");
    let listener = ipc.listen(&name).start().expect("the name is new");
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(async {
        let connecting = ipc.connect(&name).try_start().expect("it listens");
        let connecting = connecting.try_finish().expect("it listens").expect_err("it has not accepted yet");
        assert!(!is_readable_now(&connecting));
        let connecting = watch(connecting);
        let accepted = tokio::task::spawn_blocking(move || listener.accept(TIMEOUT).expect("one connects"));
        let mut ready = connecting.readable().await.expect("it is watched");
        ready.clear_ready();
        drop(ready);
        let channel =
            connecting.into_inner().try_finish().expect("it was accepted").expect("there is an answer");
        let accepted = accepted.await.expect("no panic");
        channel.send(Message::new().bytes(b"one"), TIMEOUT).expect("it is open");
        assert_eq!(accepted.receive(TIMEOUT).expect("a message").bytes(), b"one");
    });
    // A listener that ends before it accepts.
    let listener = ipc.listen(&name).start().expect("the name is free");
    let connecting = ipc.connect(&name).try_start().expect("it listens");
    drop(listener);
    assert!(is_readable(&connecting, TIMEOUT));
    let ended = connecting.try_finish().map(drop);
    assert!(matches!(ended, Err(Error::NoListener { .. })), "{ended:?}");
}

#[allow(deprecated, reason = "the other functions are unsafe, and a channel keeps its descriptor")]
fn watch<T: std::os::fd::AsRawFd>(inner: T) -> AsyncFd<T> {
    AsyncFd::with_interest(inner, Interest::READABLE).expect("a runtime runs")
}

#[test]
fn close_by_reference_wakes_every_wait() {
    let (_ipc, channel, mut peer) = connect("close", |builder| builder);
    fill(&channel, 128);
    let (sender, receiver) = channel.split();
    let begin = Instant::now();
    let (received, sent) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receiver.receive(TIMEOUT).map(drop));
        let sending = scope.spawn(|| sender.send(Message::new(), TIMEOUT));
        std::thread::sleep(Duration::from_millis(100)); // both are asleep by then, or will see it
        let closed = sender.close(Duration::ZERO);
        assert!(matches!(closed, Err(Error::Timeout { .. })), "the peer has not received: {closed:?}");
        (receiving.join().expect("no panic"), sending.join().expect("no panic"))
    });
    assert!(matches!(received, Err(Error::ChannelClosed { .. })), "{received:?}");
    assert!(matches!(sent, Err(Error::ChannelClosed { .. })), "{sent:?}");
    assert!(begin.elapsed() < Duration::from_secs(10), "they were woken");
    assert!(is_readable_now(&receiver) && is_readable_now(&sender));
    assert!(matches!(receiver.try_receive(), Err(Error::ChannelClosed { .. })));
    assert!(sender.close(TIMEOUT).is_ok(), "it is closed");
    // The peer receives the messages that were sent before, and then the end.
    assert_eq!(peer.ask("receive-all 128"), "done");
    assert_eq!(peer.ask("receive"), "ChannelClosed");
    assert_eq!(peer.ask("send x"), "ChannelClosed");
}

#[test]
fn closed_channel_keeps_the_signals_that_its_streams_have_not_reached() {
    if is_over_tcp() {
        // The host waits for the streams before it sends.
        return;
    }
    let (ipc, channel, mut peer) = connect("signals", |builder| builder);
    let stream = ipc.create_stream(0).expect("a stream");
    let memory = Arc::new(ipc.allocate(0, MIB).expect("memory"));
    let gate = stream.gate().expect("a gate");
    memory.view_mut::<u8, _>(&stream).expect("a view").fill_bytes(7).expect("submitted");
    let export = ipc.share(memory).start().expect("shared");
    channel.send(Message::new().export(export).ready_on(&stream), TIMEOUT).expect("it is open");
    drop(channel);
    // The grant of the message has ended, and its bytes are not ready.
    assert_eq!(peer.ask("read-received"), "opened");
    gate.open();
    assert_eq!(peer.receive(), format!("{MIB} of {MIB}"));
}

#[test]
fn close_wakes_a_peer_that_waits() {
    let (_ipc, channel, mut peer) = connect("wakes", |builder| builder);
    peer.send("receive");
    channel.close(TIMEOUT).expect("nothing is in flight");
    assert_eq!(peer.receive(), "ChannelClosed");
    // The same for a peer that waits for room.
    let (_ipc, channel, mut peer) = connect("wakes-sender", |builder| builder);
    assert_eq!(peer.ask("fill 128"), "done");
    peer.send("send x");
    std::thread::sleep(Duration::from_millis(50));
    drop(channel);
    assert_eq!(peer.receive(), "ChannelClosed");
}

#[test]
fn halves_close_their_own_direction() {
    let (ipc, channel, mut peer) = connect("halves", |builder| builder);
    let (sender, receiver) = channel.split();
    let sending = std::thread::spawn(move || {
        let other = sender.clone();
        other.send(Message::new().bytes(b"one"), TIMEOUT).expect("it is open");
        drop(other);
        sender.send(Message::new().bytes(b"two").export(tensor(&ipc, MIB)), TIMEOUT).expect("it is open");
    });
    sending.join().expect("no panic");
    assert_eq!([peer.ask("receive"), peer.ask("receive")], ["one", "two"]);
    assert_eq!(peer.ask("receive"), "ChannelClosed", "a clean end");
    // The other direction stays open, until the receiver is dropped too.
    assert_eq!(peer.ask("send answer"), "done");
    assert_eq!(receiver.receive(TIMEOUT).expect("a message").bytes(), b"answer");
    drop(receiver);
    assert_eq!(peer.ask("send x"), "ChannelClosed");
}

#[test]
fn dropped_receiver_refuses_messages_and_keeps_the_sender() {
    let (_ipc, channel, mut peer) = connect("deaf", |builder| builder);
    let (sender, receiver) = channel.split();
    drop(receiver);
    assert_eq!(peer.ask("send x"), "ChannelClosed");
    sender.send(Message::new().bytes(b"still"), TIMEOUT).expect("this direction is open");
    assert_eq!(peer.ask("receive"), "still");
}

#[test]
fn death_of_the_peer_wakes_threads_and_descriptors() {
    let (_ipc, channel, mut peer) = connect("death", |builder| builder);
    fill(&channel, 128);
    let (sender, receiver) = channel.split();
    assert!(matches!(sender.try_send(Message::new()), Err(TrySendError::Full(_))));
    assert!(!is_readable_now(&sender) && !is_readable_now(&receiver));
    let sent = std::thread::scope(|scope| {
        let sending = scope.spawn(|| sender.send(Message::new(), TIMEOUT));
        peer.kill();
        sending.join().expect("no panic")
    });
    assert!(matches!(sent, Err(Error::PeerGone { .. })), "{sent:?}");
    assert!(is_readable(&sender, TIMEOUT) && is_readable(&receiver, TIMEOUT));
    wait("the receiver learns it", || matches!(receiver.try_receive(), Err(Error::PeerGone { .. })));
}

#[test]
fn listeners_descriptor_is_readable_while_a_process_connects() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "accept", |builder| builder);
    assert!(listener.try_accept().expect("it listens").is_none() && !is_readable_now(&listener));
    let _peers: Vec<_> = (0..2).map(|_| start(module_path!(), "peer", &[("NAME", &name)])).collect();
    let mut channels = Vec::new();
    while channels.len() < 2 {
        assert!(is_readable(&listener, TIMEOUT));
        channels.extend(listener.try_accept().expect("it listens"));
    }
    assert!(listener.try_accept().expect("it listens").is_none() && !is_readable_now(&listener));
}

#[test]
fn types_can_be_sent_between_threads_and_tasks() {
    fn is_send_and_sync<T: Send + Sync + 'static>() {}
    is_send_and_sync::<Channel>();
    is_send_and_sync::<device_ipc::ChannelSender>();
    is_send_and_sync::<device_ipc::ChannelReceiver>();
    is_send_and_sync::<Listener>();
    is_send_and_sync::<Export>();
    is_send_and_sync::<Message<'static>>();
    is_send_and_sync::<device_ipc::Received>();
    is_send_and_sync::<Stream>();
    // A message that owns its contents.
    let (ipc, channel, mut peer) = connect("owned", |builder| builder);
    let (export, bytes) = (Arc::new(tensor(&ipc, MIB)), b"owned".to_vec());
    let message: Message<'static> =
        Message::new().bytes(bytes).export(Arc::clone(&export)).descriptor(export.descriptor().clone());
    std::thread::spawn(move || channel.send(message, TIMEOUT).map(|()| channel))
        .join()
        .expect("no panic")
        .expect("it is open");
    assert_eq!(peer.ask("receive"), "owned");
}
