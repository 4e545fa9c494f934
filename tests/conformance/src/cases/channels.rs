//! Channels: messages of bytes and tensors between two processes, what becomes of them when either ends, and device maps.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use device_ipc_core::{
    BundleExport, Channel, DeviceMap, DeviceOwner, Dtype, Error, Export, Ipc, MAX_MESSAGE_TENSORS, Message,
    ReceivedTensor, Stream, TensorLayout, counters,
};

use crate::agent::{Agent, Answer, BundleSharing, BundledTensor, Command, Copying, Mapped, Place};
use crate::check::{Refusal, equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, Witness, bytes_of, float_bytes, nobody_holds, pattern, tensor_bytes};
use crate::timing::{Seen, while_delayed};
use crate::{Context, Outcome, PATIENCE, Stop, fail, skip, unchecked};

const BYTES: usize = 4096;
const COUNT: usize = 1024;
const SHORT: Duration = Duration::from_millis(50);
const AT_ONCE: Duration = Duration::from_secs(10);

/// A name that no other process has.
fn name(what: &str) -> String {
    format!("conformance-{}-{what}", std::process::id())
}

fn map(pairs: &[(u32, u32)]) -> Result<DeviceMap, Error> {
    pairs.iter().try_fold(DeviceMap::new(), |map, (from, to)| map.insert(*from, *to))
}

/// This process as the listener, and an agent whose channel is called `c`.
fn pair(context: &Context) -> Result<(Channel, Agent), Stop> {
    pair_mapped(context, &[], &[])
}

fn pair_mapped(
    context: &Context,
    own: &[(u32, u32)],
    agents: &[(u32, u32)],
) -> Result<(Channel, Agent), Stop> {
    let mut agent = context.agent()?;
    let (own, agents) = tried_pair(context, &mut agent, own, agents)?;
    went_well(agents)?;
    Ok((own?, agent))
}

/// An agent's answer that had to be one.
#[track_caller]
fn went_well<T>(answer: Result<T, Refusal>) -> Outcome {
    match answer {
        Ok(_) => Ok(()),
        Err(refusal) => fail(format!("the agent got {}: {}", refusal.kind, refusal.text)),
    }
}

/// What either end makes of a connection: this process, the agent.
type Both = (Result<Channel, Error>, Result<Answer, Refusal>);

/// Both ends' own view of a connection.
fn tried_pair(
    context: &Context,
    agent: &mut Agent,
    own: &[(u32, u32)],
    agents: &[(u32, u32)],
) -> Result<Both, Stop> {
    let under = name("pair");
    let listener = context.ipc().listen(&under).device_map(map(own)?).start()?;
    let (map, listens) = (agents.to_vec(), false);
    agent.begin(&Command::Channel { name: "c".into(), under, listens, map, timeout: PATIENCE })?;
    let channel = listener.accept(PATIENCE);
    Ok((channel, agent.answer()?.result))
}

fn receive(agent: &mut Agent, into: &str) -> Result<Vec<u8>, Stop> {
    match agent.must(&Command::Receive { name: into.into(), by: "c".into(), timeout: PATIENCE })? {
        Answer::Bytes(bytes) => Ok(bytes),
        other => fail(format!("the agent answered {other:?}")),
    }
}

fn open_at(agent: &mut Agent, of: &str, index: usize, place: Option<Place>) -> Result<Mapped, Stop> {
    let name = format!("{of}.{index}");
    match agent.must(&Command::OpenReceived { name, of: of.into(), index, place, timeout: PATIENCE })? {
        Answer::Mapping(mapped) => Ok(mapped),
        other => fail(format!("the agent answered {other:?}")),
    }
}

fn discard(agent: &mut Agent, name: &str) -> Outcome {
    agent.must(&Command::Discard { name: name.into() }).map(drop)
}

fn send(agent: &mut Agent, bytes: &[u8], of: &[&str], ready_on: Option<u32>) -> Outcome {
    let of = of.iter().map(|name| (*name).to_owned()).collect();
    agent
        .must(&Command::Send { by: "c".into(), bytes: bytes.to_vec(), of, ready_on, timeout: PATIENCE })
        .map(drop)
}

fn requests(agent: &mut Agent) -> Result<u64, Stop> {
    match agent.must(&Command::Requests)? {
        Answer::Number(count) => Ok(count),
        other => fail(format!("the agent answered {other:?}")),
    }
}

/// Memory with known bytes, whose owner tells when it is dropped.
fn witnessed(context: &Context, bytes: &[u8]) -> Result<(Export, std::sync::mpsc::Receiver<()>), Stop> {
    let memory = Memory::with_bytes(context, 0, bytes)?;
    let (owner, dropped) = Witness::of(&memory);
    let owner = unchecked::owned(owner, memory.buffer.region());
    Ok((memory.ipc.share(owner).start()?, dropped))
}

#[track_caller]
fn is_kept(dropped: &std::sync::mpsc::Receiver<()>, why: &str) -> Outcome {
    that(dropped.recv_timeout(SHORT).is_err(), format!("the owner should be kept {why}"))
}

#[track_caller]
fn is_dropped(dropped: &std::sync::mpsc::Receiver<()>, why: &str) -> Outcome {
    that(dropped.recv_timeout(SOON).is_ok(), format!("the owner should be dropped {why}"))
}

/// What fits a packet and what does not, in the order in which it was sent, in both directions at once.
pub fn bytes_of_all_sizes_in_order(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let sizes = [0, 1, 100, 65_000, 65_530, 65_536, 70_000, 3_000_000];
    let answers =
        Command::Echo { by: "c".into(), times: sizes.len() as u32, answers: true, timeout: PATIENCE };
    agent.begin(&answers)?;
    let messages = sizes.map(pattern);
    for message in &messages {
        channel.send(Message::new().bytes(message), PATIENCE)?;
    }
    for message in &messages {
        same(channel.receive(PATIENCE)?.bytes(), message, format!("the answer of {} bytes", message.len()))?;
    }
    went_well(agent.answer()?.result)?;
    Ok(())
}

/// `send(t); drop(t)`: the memory stays until the receiver has opened it and let go.
pub fn tensor_outlives_its_export(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    channel.send(Message::new().bytes(b"t").tensor(&share), PATIENCE)?;
    drop(share);
    is_kept(&dropped, "by a message that has not been received")?;
    equal(receive(&mut agent, "r")?, b"t".to_vec(), "the bytes of the message")?;
    is_kept(&dropped, "by a message that has not been opened")?;
    open_at(&mut agent, "r", 0, Some(Place::Home))?;
    same(&agent.bytes("r.0")?, &bytes, "the bytes of the tensor")?;
    discard(&mut agent, "r")?;
    is_kept(&dropped, "by a mapping")?;
    agent.drop_mapping("r.0")?;
    is_dropped(&dropped, "when the mapping has gone")
}

/// What the receiver does not open goes back: by dropping the message, by closing the channel before reading it.
pub fn unopened_tensor_goes_back(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = witnessed(context, &pattern(BYTES))?;
    channel.send(Message::new().tensor(&share).tensor(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    is_kept(&dropped, "by a message")?;
    discard(&mut agent, "r")?;
    is_dropped(&dropped, "when the message has been")?;
    let (share, dropped) = witnessed(context, &pattern(BYTES))?;
    channel.send(Message::new().tensor(&share), PATIENCE)?;
    drop(share);
    agent.must(&Command::CloseChannel { name: "c".into(), timeout: None })?;
    is_dropped(&dropped, "when the receiver has closed the channel over the message")?;
    refused(channel.send(Message::new(), PATIENCE), "a send to who has closed", "ChannelClosed", &["closed"])
}

/// The channel may go on both sides: what was received can still be opened.
pub fn unopened_tensor_outlives_both_ends(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    channel.send(Message::new().tensor(&share), PATIENCE)?;
    drop((share, channel));
    receive(&mut agent, "r")?;
    agent.must(&Command::CloseChannel { name: "c".into(), timeout: None })?;
    is_kept(&dropped, "though both ends are closed")?;
    open_at(&mut agent, "r", 0, Some(Place::Home))?;
    same(&agent.bytes("r.0")?, &bytes, "the bytes of the tensor")?;
    agent.drop_mapping("r.0")?;
    is_dropped(&dropped, "when the mapping has gone")
}

/// A plain descriptor is opened as on any other road: not once its export has been dropped.
pub fn forwarded_descriptor_has_no_grant(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let mut third = context.agent()?;
    let bytes = pattern(BYTES);
    let descriptor = third.export("x", &bytes)?;
    channel.send(Message::new().descriptor(&descriptor), PATIENCE)?;
    channel.send(Message::new().descriptor(&descriptor), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_at(&mut agent, "r", 0, Some(Place::Home))?;
    same(&agent.bytes("r.0")?, &bytes, "the bytes of the third process")?;
    third.must(&Command::DropExport { name: "x".into() })?;
    receive(&mut agent, "s")?;
    let open = Command::OpenReceived {
        name: "late".into(),
        of: "s".into(),
        index: 0,
        place: Some(Place::Home),
        timeout: PATIENCE,
    };
    refused(agent.tell(&open)?.result, "a descriptor whose export was dropped", "ExportDropped", &[])
}

/// An open that fails before the exporter was asked leaves the grant.
pub fn failed_open_can_be_tried_again(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    channel.send(Message::new().tensor(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    let open = |place| Command::OpenReceived {
        name: "m".into(),
        of: "r".into(),
        index: 0,
        place: Some(place),
        timeout: PATIENCE,
    };
    let nowhere = agent.tell(&open(Place::Device(4711)))?.result;
    refused(nowhere, "an open on a device that is not there", "NoSuchDevice", &["4711"])?;
    is_kept(&dropped, "after an open that failed")?;
    agent.must(&open(Place::Home))?;
    same(&agent.bytes("m")?, &bytes, "the bytes of the tensor")
}

/// A tensor that goes there and back, again and again: once it is open there, nothing is said but the messages.
pub fn round_trips_cost_no_other_message(context: &Context) -> Outcome {
    const ROUNDS: u32 = 300;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_bytes(context, 0, &pattern(BYTES))?;
    let share = memory.share()?;
    let mut trips = |times| -> Outcome {
        agent.begin(&Command::Echo { by: "c".into(), times, answers: true, timeout: PATIENCE })?;
        for _ in 0..times {
            channel.send(Message::new().bytes(b"ping").tensor(&share), PATIENCE)?;
            equal(channel.receive(PATIENCE)?.bytes(), b"ping", "the answer")?;
        }
        went_well(agent.answer()?.result)?;
        Ok(())
    };
    trips(1)?;
    let served = counters().messages_total;
    trips(ROUNDS)?;
    equal(counters().messages_total, served, "messages to this process's broker in so many round trips")?;
    // The last is known to be over when the memory is waited for.
    share.close(SOON)?;
    Ok(())
}

/// A tensor that only goes there, again and again, is free when its export goes.
pub fn one_way_leaves_no_grants(context: &Context) -> Outcome {
    const ROUNDS: u32 = 500;
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = witnessed(context, &pattern(BYTES))?;
    let echo = |times| Command::Echo { by: "c".into(), times, answers: false, timeout: PATIENCE };
    agent.begin(&echo(1))?;
    channel.send(Message::new().tensor(&share), PATIENCE)?;
    went_well(agent.answer()?.result)?;
    let (asked, served) = (requests(&mut agent)?, counters().messages_total);
    agent.begin(&echo(ROUNDS))?;
    for _ in 0..ROUNDS {
        channel.send(Message::new().tensor(&share), PATIENCE)?;
    }
    went_well(agent.answer()?.result)?;
    equal(requests(&mut agent)?, asked, "requests for memory that is open already")?;
    let told = counters().messages_total - served;
    that(
        told <= u64::from(ROUNDS / 64) + 1,
        format!("the broker should hear of grants now and then, not {told} times"),
    )?;
    // A lease that is kept, and grants that the exporter has not heard of: neither outlives the export.
    drop(share);
    is_dropped(&dropped, "when everything that was sent has been opened and let go")
}

/// The receiver's stream waits for the sender's; nobody's host does.
pub fn stream_waits_for_ready(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    channel.send(Message::new().tensor(&share).ready_on(&memory.stream), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_at(&mut agent, "r", 0, Some(Place::Stream(0)))?;
    equal(agent.floats("r.0")?[0], OLD, "the float before")?;
    let mut expected = OLD;
    while_delayed("sending, receiving and opening", |delay| {
        expected += 1.0;
        let begun = Instant::now();
        memory.stream.delay(delay)?;
        memory.add(1.0)?;
        channel.send(Message::new().tensor(&share).ready_on(&memory.stream), PATIENCE)?;
        receive(&mut agent, "r")?;
        open_at(&mut agent, "r", 0, Some(Place::Stream(0)))?;
        let seen = Seen::since(begun, Ok(()));
        let verdict = same(&agent.floats("r.0")?, &[expected; COUNT], "the floats behind the wait");
        agent.must(&Command::CheckReceived { of: "r".into() })?;
        Ok(Seen { verdict, ..seen })
    })
}

/// A fast stream's signal does not overtake a slow one's: the first message's tensor is waited for all the same.
pub fn streams_signal_in_turn(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let fast = memory.ipc.create_stream(0)?;
    channel.send(Message::new().tensor(&share).ready_on(&memory.stream).ready_on(&fast), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_at(&mut agent, "r", 0, Some(Place::Stream(0)))?;
    let mut expected = OLD;
    while_delayed("sending twice, receiving and opening", |delay| {
        expected += 1.0;
        let begun = Instant::now();
        memory.stream.delay(delay)?;
        memory.add(1.0)?;
        channel.send(Message::new().tensor(&share).ready_on(&memory.stream), PATIENCE)?;
        channel.send(Message::new().ready_on(&fast), PATIENCE)?;
        receive(&mut agent, "r")?;
        open_at(&mut agent, "r", 0, Some(Place::Stream(0)))?;
        receive(&mut agent, "other")?;
        let seen = Seen::since(begun, Ok(()));
        let verdict = same(&agent.floats("r.0")?, &[expected; COUNT], "the floats behind the wait");
        Ok(Seen { verdict, ..seen })
    })
}

/// A receiver without a stream waits on its host; and where streams have no words, the sender does before it sends.
pub fn host_waits_for_ready(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    memory.stream.delay(SHORT)?;
    memory.add(1.0)?;
    channel.send(Message::new().tensor(&share).ready_on(&memory.stream), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_at(&mut agent, "r", 0, Some(Place::Home))?;
    same(&agent.floats("r.0")?, &[OLD + 1.0; COUNT], "the floats behind the wait")
}

/// A stream that waits for a sender who dies goes on, and the message says so.
pub fn sender_killed_while_a_stream_waits(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    agent.export("x", &pattern(BYTES))?;
    send(&mut agent, b"", &["x"], Some(0))?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let first = channel.receive(PATIENCE)?;
    drop(first.tensors()[0].open().on(&stream)?);
    stream.synchronize()?;
    agent.must(&Command::Delay { device: 0, time: Duration::from_secs(3600) })?;
    send(&mut agent, b"", &["x"], Some(0))?;
    let received = channel.receive(PATIENCE)?;
    let mapping = received.tensors()[0].open().on(&stream)?;
    received.check()?;
    agent.kill()?;
    goes_on(&stream)?;
    refused(received.check(), "what was never written", "PeerGone", &["has ended"])?;
    first.check()?;
    drop(mapping);
    let late = received.tensors()[0].open().on(&stream);
    refused(late, "opening what was never written", "PeerGone", &[])
}

#[track_caller]
fn goes_on(stream: &Stream) -> Outcome {
    let (done, told) = channel();
    let waiting = stream.clone();
    std::thread::spawn(move || {
        // The case may have given up.
        let _ = done.send(waiting.synchronize());
    });
    match told.recv_timeout(AT_ONCE) {
        Ok(synchronized) => Ok(synchronized?),
        Err(_) => fail(format!(
            "the stream that waits should go on when the sender dies, and did not in {AT_ONCE:?}"
        )),
    }
}

/// What a process sent before it was killed is received, then the error names it; its tensors died with it.
pub fn sender_killed(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (told, hear) = std::sync::mpsc::channel();
    channel.on_gone(move |error| drop(told.send(error.to_string())));
    agent.export("x", &pattern(BYTES))?;
    send(&mut agent, b"one", &["x"], None)?;
    send(&mut agent, &pattern(100_000), &[], None)?;
    let pid = agent.peer().id().to_string();
    agent.kill()?;
    let said = hear.recv_timeout(SOON);
    that(said.is_ok_and(|text| text.contains(&pid)), "on_gone should be called with who it was")?;
    let one = channel.receive(PATIENCE)?;
    equal(one.bytes(), b"one", "what was sent before the death")?;
    equal(channel.receive(PATIENCE)?.bytes().len(), 100_000, "the length of what came behind it")?;
    refused(channel.receive(PATIENCE), "receiving from the dead", "PeerGone", &[&pid, "without closing"])?;
    refused(channel.send(Message::new(), PATIENCE), "sending to the dead", "PeerGone", &[&pid])?;
    refused(one.tensors()[0].open().at_home(), "opening what died", "ExporterGone", &[&pid])
}

/// A process that closes and ends before the receiver has opened: its exports have ended with it.
pub fn sender_that_ends_takes_its_exports(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    agent.export("x", &pattern(BYTES))?;
    send(&mut agent, b"one", &["x"], None)?;
    agent.must(&Command::CloseChannel { name: "c".into(), timeout: None })?;
    agent.exit()?;
    let one = channel.receive(PATIENCE)?;
    equal(one.bytes(), b"one", "what was sent before the end")?;
    refused(channel.receive(PATIENCE), "receiving behind the end", "ChannelClosed", &["closed"])?;
    refused(one.tensors()[0].open().at_home(), "opening what has ended", "ExporterGone", &[])
}

/// A receiver's death ends what it was sent, opened or not.
pub fn receiver_killed(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (opened, opened_dropped) = witnessed(context, &pattern(BYTES))?;
    let (received, received_dropped) = witnessed(context, &pattern(BYTES))?;
    let (unread, unread_dropped) = witnessed(context, &pattern(BYTES))?;
    for share in [&opened, &received, &unread] {
        channel.send(Message::new().tensor(share), PATIENCE)?;
    }
    drop((opened, received, unread));
    receive(&mut agent, "a")?;
    open_at(&mut agent, "a", 0, Some(Place::Home))?;
    receive(&mut agent, "b")?;
    for dropped in [&opened_dropped, &received_dropped, &unread_dropped] {
        is_kept(dropped, "by who lives")?;
    }
    let pid = agent.peer().id().to_string();
    agent.kill()?;
    is_dropped(&opened_dropped, "when who had opened it has died")?;
    is_dropped(&received_dropped, "when who had received it has died")?;
    is_dropped(&unread_dropped, "when who would have received it has died")?;
    refused(channel.send(Message::new(), PATIENCE), "sending to the dead", "PeerGone", &[&pid])
}

/// `close` returns when everything has been opened or discarded, and says how far it is when it is not.
pub fn close_waits_for_the_receiver(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    agent.export("x", &pattern(BYTES))?;
    send(&mut agent, b"", &["x"], None)?;
    send(&mut agent, b"", &["x"], None)?;
    let first = channel.receive(PATIENCE)?;
    let close = |timeout| Command::CloseChannel { name: "c".into(), timeout: Some(timeout) };
    agent.begin(&close(PATIENCE))?;
    let second = channel.receive(PATIENCE)?;
    let mapping = first.tensors()[0].open().at_home()?;
    that(agent.peer().receive_line(SHORT).is_err(), "close should wait for a tensor that may be opened")?;
    drop(second);
    went_well(agent.answer()?.result)?;
    refused(channel.receive(PATIENCE), "receiving behind a close", "ChannelClosed", &[])?;
    drop(mapping);
    let (channel, mut agent) = pair(context)?;
    send(&mut agent, b"", &[], None)?;
    let late = agent.tell(&close(SHORT))?.result;
    refused(late, "a close that nobody waits for", "Timeout", &["received 0 of 1 messages"])?;
    equal(channel.receive(PATIENCE)?.bytes(), b"", "what was sent all the same")
}

/// An end that is closed: what it had sent is received first, also what did not fit a packet.
pub fn closed_after_everything_was_received(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let sent = [pattern(10), pattern(200_000), pattern(20)];
    for message in &sent {
        send(&mut agent, message, &[], None)?;
    }
    agent.must(&Command::CloseChannel { name: "c".into(), timeout: None })?;
    for message in &sent {
        same(channel.receive(PATIENCE)?.bytes(), message, "a message before the end")?;
    }
    for _ in 0..2 {
        refused(channel.receive(PATIENCE), "receiving behind the end", "ChannelClosed", &["closed"])?;
    }
    Ok(())
}

/// A send that finds no room sends nothing and keeps nothing; when there is room again, the next one goes.
pub fn receiver_that_never_reads(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_bytes(context, 0, &pattern(BYTES))?;
    let share = memory.share()?;
    let filler = vec![7; 8192];
    let mut sent = 0;
    let late = loop {
        match channel.send(Message::new().bytes(&filler).tensor(&share), SHORT) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        that(sent < 100_000, "the queue should be full at some time")?;
    };
    refused(
        Err::<(), _>(late),
        "a send without room",
        "Timeout",
        &["does not read", "Nothing of the message"],
    )?;
    agent.must(&Command::Echo { by: "c".into(), times: sent, answers: false, timeout: PATIENCE })?;
    channel.send(Message::new().bytes(b"next"), PATIENCE)?;
    equal(receive(&mut agent, "r")?, b"next".to_vec(), "the message behind those that fit")?;
    share.close(SOON)?;
    Ok(())
}

/// What is too large is refused before anything of it is sent, and nothing is kept for it.
pub fn too_much_for_a_message(context: &Context) -> Outcome {
    let under = name("limits");
    let ipc = context.ipc();
    let listener = ipc.listen(&under).start()?;
    let near = std::thread::spawn({
        let (ipc, under) = (ipc.clone(), under.clone());
        move || ipc.connect(&under).message_limit(100_000).timeout(PATIENCE).start()
    });
    let far = listener.accept(PATIENCE)?;
    let near = near.join().map_err(|_| Stop::failed("the connecting thread panicked"))??;
    equal(
        (near.message_limit(), far.message_limit()),
        (100_000, 100_000),
        "the limits, the smaller of both",
    )?;
    let memory = Memory::with_bytes(context, 0, &pattern(BYTES))?;
    let share = memory.share()?;
    for end in [&near, &far] {
        let large = end.send(Message::new().bytes(vec![0; 100_000]).tensor(&share), PATIENCE);
        refused(large, "too many bytes", "MessageTooLarge", &["100000", "message_limit"])?;
    }
    let many = (0..=MAX_MESSAGE_TENSORS).fold(Message::new(), |message, _| message.tensor(&share));
    refused(near.send(many, PATIENCE), "too many tensors", "MessageTooLarge", &["1025 tensors", "1024"])?;
    nobody_holds(&share, "messages that were not sent")?;
    let most = (0..MAX_MESSAGE_TENSORS / 8).fold(Message::new(), |message, _| message.tensor(&share));
    near.send(most, PATIENCE)?;
    equal(far.receive(PATIENCE)?.tensors().len(), MAX_MESSAGE_TENSORS / 8, "the tensors of a message")?;
    nobody_holds(&share, "a message that was discarded")
}

/// Each client has a channel of its own, and the end of one is not the end of the others.
pub fn several_clients(context: &Context) -> Outcome {
    let under = name("clients");
    let listener = context.ipc().listen(&under).start()?;
    let mut clients = Vec::new();
    for index in 0..3_u8 {
        let mut agent = context.agent()?;
        let (under, map) = (under.clone(), Vec::new());
        agent.begin(&Command::Channel { name: "c".into(), under, listens: false, map, timeout: PATIENCE })?;
        let channel = listener.accept(PATIENCE)?;
        went_well(agent.answer()?.result)?;
        equal(channel.peer().pid, agent.peer().id(), "the process at the other end")?;
        send(&mut agent, &[index], &[], None)?;
        clients.push((channel, agent));
    }
    let (_, agent) = clients.remove(1);
    agent.kill()?;
    for ((channel, agent), index) in clients.iter_mut().zip([0, 2]) {
        equal(channel.receive(PATIENCE)?.bytes(), &[index], "what a client sent")?;
        channel.send(Message::new().bytes(&[index]), PATIENCE)?;
        equal(receive(agent, "r")?, vec![index], "what a client was sent")?;
    }
    refused(listener.accept(SHORT), "accepting nobody", "Timeout", &[&under])
}

/// Both ends in this process: what is sent is opened by its address.
pub fn both_ends_in_one_process(context: &Context) -> Outcome {
    let (near, far) = local_pair(context, "own")?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    let address = share.descriptor().len();
    near.send(Message::new().bytes(b"own").tensor(&share).tensor(&share), PATIENCE)?;
    drop(share);
    let received = far.receive(PATIENCE)?;
    equal(received.bytes(), b"own", "the bytes of the message")?;
    let stream = context.ipc().create_stream(0)?;
    let mapping = received.tensors()[0].open().on(&stream)?;
    equal(mapping.len(), address, "the length of the tensor")?;
    same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes of the tensor")?;
    received.reply(Message::new().bytes(b"thanks"), PATIENCE)?;
    equal(near.receive(PATIENCE)?.bytes(), b"thanks", "the answer")?;
    drop((mapping, near));
    is_kept(&dropped, "by the tensor that was not opened")?;
    refused(far.receive(PATIENCE), "receiving behind the end", "ChannelClosed", &[])?;
    let kept: Vec<ReceivedTensor> = received.into_tensors();
    drop(far);
    drop(kept);
    is_dropped(&dropped, "when both have gone")
}

fn local_pair(context: &Context, what: &str) -> Result<(Channel, Channel), Stop> {
    let under = name(what);
    let listener = context.ipc().listen(&under).start()?;
    let connect = |ipc: Ipc, under: String| move || ipc.connect(&under).timeout(PATIENCE).start();
    let near = std::thread::spawn(connect(context.ipc(), under));
    let far = listener.accept(PATIENCE)?;
    let near = near.join().map_err(|_| Stop::failed("the connecting thread panicked"))??;
    Ok((near, far))
}

/// Names that are none, that are taken, that nobody has, and that are free again.
pub fn names(context: &Context) -> Outcome {
    let ipc = context.ipc();
    for bad in ["", "a/b", "a b", "ä", &"x".repeat(65)] {
        refused(ipc.listen(bad).start(), "listening under no name", "InvalidChannelName", &[])?;
        refused(ipc.connect(bad).start(), "connecting to no name", "InvalidChannelName", &[])?;
    }
    let under = name("names");
    let begun = Instant::now();
    let nobody = ipc.connect(&under).timeout(SHORT).start();
    refused(nobody, "connecting to nobody", "NobodyListens", &[&under, "DEVICE_IPC_SOCKET_DIR"])?;
    that(begun.elapsed() >= SHORT, "somebody who is not there should be waited for")?;
    let listener = ipc.listen(&under).start()?;
    let pid = std::process::id().to_string();
    refused(ipc.listen(&under).start(), "listening twice", "ChannelNameInUse", &[&under, &pid])?;
    let unaccepted = ipc.connect(&under).timeout(SHORT).start();
    refused(unaccepted, "connecting to who does not accept", "Timeout", &["has not called accept"])?;
    drop(listener);
    // A listener that comes later is waited for.
    let waiting = std::thread::spawn({
        let (ipc, under) = (ipc.clone(), under.clone());
        move || ipc.connect(&under).timeout(PATIENCE).start()
    });
    let listener = ipc.listen(&under).start()?;
    let accepted = listener.accept(PATIENCE)?;
    let connected = waiting.join().map_err(|_| Stop::failed("the connecting thread panicked"))??;
    drop(listener);
    connected.send(Message::new().bytes(b"on"), PATIENCE)?;
    equal(accepted.receive(PATIENCE)?.bytes(), b"on", "what goes on without the listener")
}

/// The map of one end serves both: what it sends, and by its inverse what it is sent and answered.
pub fn mapped_there_and_back(context: &Context) -> Outcome {
    context.two_peers()?;
    if !context.backend().peer_access(0.into(), 1.into())? {
        return skip("needs peer access in both directions");
    }
    let (channel, mut agent) = pair_mapped(context, &[(0, 1), (1, 0)], &[])?;
    let bytes = pattern(BYTES);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.share()?;
    channel.send(Message::new().tensor(&share), PATIENCE)?;
    receive(&mut agent, "r")?;
    match agent.must(&Command::DeviceOfReceived { of: "r".into() })? {
        Answer::Number(device) => equal(device, 1, "the device that the map says")?,
        other => return fail(format!("the agent answered {other:?}")),
    }
    let elsewhere = Command::OpenReceived {
        name: "no".into(),
        of: "r".into(),
        index: 0,
        place: Some(Place::Home),
        timeout: PATIENCE,
    };
    let elsewhere = agent.tell(&elsewhere)?.result;
    refused(elsewhere, "opening where the map does not say", "InvalidDeviceMap", &["device 1"])?;
    let mapped = open_at(&mut agent, "r", 0, None)?;
    equal((mapped.device, mapped.at_home), (1, false), "where it was opened")?;
    same(&agent.bytes("r.0")?, &bytes, "the bytes of the tensor")?;
    // The agent has no map: what it sends, and what it answers, goes by the inverse.
    agent.allocate("y", 1, &bytes)?;
    agent.share("y", crate::agent::Sharing::default())?;
    let answer =
        Command::Answer { of: "r".into(), bytes: Vec::new(), tensors: vec!["y".into()], timeout: PATIENCE };
    agent.must(&answer)?;
    send(&mut agent, b"", &["y"], None)?;
    for what in ["the answer", "the message"] {
        let received = channel.receive(PATIENCE)?;
        let device = received.tensors()[0].device().map(|device| device.get());
        equal(device, Some(0), format!("the device that the map says for {what}"))?;
        let mapping = received.tensors()[0].open().mapped()?;
        equal(mapping.device().get(), 0, format!("where {what} was opened"))?;
    }
    Ok(())
}

/// What the map does not name is refused where it is sent, with the device, the peer and the call; and nothing is kept.
pub fn device_that_is_not_mapped(context: &Context) -> Outcome {
    let [_, second] = context.two_devices()?;
    let (channel, mut agent) = pair_mapped(context, &[(0, 0)], &[])?;
    let memory = Memory::with_bytes(context, 1, &pattern(BYTES))?;
    let share = memory.share()?;
    let home = second.identity.to_string();
    let pid = agent.peer().id().to_string();
    let sent = channel.send(Message::new().tensor(&share), PATIENCE);
    refused(sent, "memory that is not mapped", "NotInDeviceMap", &[&home, &pid, "device_map"])?;
    nobody_holds(&share, "a message that was not sent")?;
    agent.allocate("y", 1, &pattern(BYTES))?;
    agent.share("y", crate::agent::Sharing::default())?;
    let own = Command::Send {
        by: "c".into(),
        bytes: Vec::new(),
        of: vec!["y".into()],
        ready_on: None,
        timeout: PATIENCE,
    };
    refused(agent.tell(&own)?.result, "memory that the inverse does not map", "NotInDeviceMap", &[&home])?;
    // What is the receiver's own is at home there, and needs no map.
    let theirs = Memory::with_bytes(context, 1, &pattern(BYTES))?.share()?;
    let forwarded = theirs.descriptor().clone();
    channel.send(Message::new().bytes(forwarded.to_bytes()), PATIENCE)?;
    equal(receive(&mut agent, "r")?, forwarded.to_bytes(), "the bytes of a descriptor, which no map concerns")
}

/// A map that does not fit the devices of both ends is refused on both, with the pair and the side.
pub fn maps_are_checked_at_connection(context: &Context) -> Outcome {
    let cases = [
        (vec![(0, 4711)], vec![], "device 0 to 4711", "the receiver sees no device 4711"),
        (vec![(4711, 0)], vec![], "device 4711 to 0", "the sender sees no device 4711"),
        (vec![], vec![(0, 4711)], "device 0 to 4711", "the receiver sees no device 4711"),
    ];
    for (own, agents, pair, why) in cases {
        let mut agent = context.agent()?;
        let (accepted, connected) = tried_pair(context, &mut agent, &own, &agents)?;
        refused(accepted, "accepting with a map that does not fit", "InvalidDeviceMap", &[pair, why])?;
        refused(connected, "connecting with a map that does not fit", "InvalidDeviceMap", &[pair, why])?;
    }
    let twice = DeviceMap::new().insert(0, 1).and_then(|map| map.insert(1, 1));
    refused(twice, "a map that is not one to one", "InvalidDeviceMap", &["once"])
}

/// A bundle of two tensors of bytes on each of these devices, `t0` and so on, whose owners tell when they are dropped.
fn bundle(
    context: &Context,
    devices: &[u32],
) -> Result<(BundleExport, Vec<std::sync::mpsc::Receiver<()>>), Stop> {
    let (ipc, mut dropped) = (context.ipc(), Vec::new());
    let mut bundle = ipc.bundle();
    for (index, device) in devices.iter().enumerate() {
        let bytes = [bytes_of_tensor(2 * index), bytes_of_tensor(2 * index + 1)].concat();
        let memory = Memory::with_bytes(context, *device, &bytes)?;
        let (owner, gone) = Witness::of(&memory);
        let memory = bundle.memory(unchecked::owned(owner, memory.buffer.region()));
        dropped.push(gone);
        for half in 0..2 {
            let layout = TensorLayout::contiguous(Dtype::U8, [BYTES as u64])?;
            bundle.tensor(format!("t{}", 2 * index + half), memory, (half * BYTES) as u64, layout)?;
        }
    }
    Ok((bundle.start()?, dropped))
}

fn bytes_of_tensor(index: usize) -> Vec<u8> {
    pattern(BYTES + index)[index..].to_vec()
}

fn open_bundle(agent: &mut Agent, of: &str, place: Option<Place>) -> Outcome {
    let (name, of) = (format!("{of}.b"), of.to_owned());
    agent.must(&Command::OpenReceivedBundle { name, of, index: 0, place, timeout: PATIENCE }).map(drop)
}

/// The agent has these tensors, as they were written.
fn has_tensors(agent: &mut Agent, of: &str, count: usize) -> Outcome {
    for index in 0..count {
        let tensor = format!("t{index}");
        let read = Command::TensorBytes { name: format!("{of}.b"), tensor: tensor.clone() };
        match agent.must(&read)? {
            Answer::Bytes(bytes) => same(&bytes, &bytes_of_tensor(index), tensor)?,
            other => return fail(format!("the agent answered {other:?}")),
        }
    }
    Ok(())
}

fn release_bundle(agent: &mut Agent, of: &str, device: u32) -> Outcome {
    agent.must(&Command::ReleaseBundle { name: format!("{of}.b"), device }).map(drop)
}

/// `send(b); drop(b)`: the memory stays until the receiver has opened the bundle and let go.
pub fn bundle_outlives_its_export(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = bundle(context, &[0, 0])?;
    channel.send(Message::new().bytes(b"state").bundle(&share), PATIENCE)?;
    drop(share);
    equal(receive(&mut agent, "r")?, b"state".to_vec(), "the bytes of the message")?;
    is_kept(&dropped[1], "by a message that has not been opened")?;
    open_bundle(&mut agent, "r", Some(Place::Home))?;
    has_tensors(&mut agent, "r", 4)?;
    discard(&mut agent, "r")?;
    is_kept(&dropped[0], "by a mapping")?;
    release_bundle(&mut agent, "r", 0)?;
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when the mapping has gone"))
}

/// What lies on two devices has a grant for each.
pub fn bundle_of_two_devices(context: &Context) -> Outcome {
    context.two_devices()?;
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = bundle(context, &[0, 1])?;
    let memory = Memory::with_bytes(context, 0, &pattern(BYTES))?;
    let tensor = memory.share()?;
    channel.send(Message::new().tensor(&tensor).bundle(&share).tensor(&tensor), PATIENCE)?;
    drop((share, tensor));
    receive(&mut agent, "r")?;
    dropped.iter().try_for_each(|dropped| is_kept(dropped, "by a message that has not been opened"))?;
    open_bundle(&mut agent, "r", Some(Place::Home))?;
    has_tensors(&mut agent, "r", 4)?;
    open_at(&mut agent, "r", 1, Some(Place::Home))?;
    same(&agent.bytes("r.1")?, &pattern(BYTES), "the bytes of the tensor behind the bundle")?;
    release_bundle(&mut agent, "r", 1)?;
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when the mapping has gone"))
}

/// A bundle that nobody opens goes back: by dropping the message, and by the receiver's death.
pub fn unopened_bundle_goes_back(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = bundle(context, &[0])?;
    channel.send(Message::new().bundle(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    is_kept(&dropped[0], "by a message")?;
    discard(&mut agent, "r")?;
    is_dropped(&dropped[0], "when the message has been")?;
    let (share, dropped) = bundle(context, &[0])?;
    channel.send(Message::new().bundle(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    is_kept(&dropped[0], "by who lives")?;
    agent.kill()?;
    is_dropped(&dropped[0], "when who had received it has died")
}

/// An open that fails before the exporter was asked leaves the grants.
pub fn bundle_that_failed_can_be_tried_again(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = bundle(context, &[0, 0])?;
    channel.send(Message::new().bundle(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    let (name, of) = ("r.b".to_owned(), "r".to_owned());
    let place = Some(Place::Device(4711));
    let nowhere = Command::OpenReceivedBundle { name, of, index: 0, place, timeout: PATIENCE };
    let nowhere = agent.tell(&nowhere)?.result;
    refused(nowhere, "an open on a device that is not there", "InBundle", &["4711", "t0"])?;
    is_kept(&dropped[1], "after an open that failed")?;
    open_bundle(&mut agent, "r", Some(Place::Home))?;
    has_tensors(&mut agent, "r", 4)
}

/// A bundle that goes there and back: once it is open there, nothing is said but the messages.
pub fn bundle_round_trips_cost_no_other_message(context: &Context) -> Outcome {
    const ROUNDS: u32 = 100;
    let (channel, mut agent) = pair(context)?;
    let (share, _dropped) = bundle(context, &[0, 0])?;
    let mut trips = |times| -> Outcome {
        agent.begin(&Command::Echo { by: "c".into(), times, answers: true, timeout: PATIENCE })?;
        for _ in 0..times {
            channel.send(Message::new().bytes(b"ping").bundle(&share), PATIENCE)?;
            equal(channel.receive(PATIENCE)?.bytes(), b"ping", "the answer")?;
        }
        went_well(agent.answer()?.result)?;
        Ok(())
    };
    trips(1)?;
    let served = counters().messages_total;
    trips(ROUNDS)?;
    equal(counters().messages_total, served, "messages to this process's broker in so many round trips")?;
    share.close(SOON)?;
    Ok(())
}

/// The receiver's stream waits for the sender's before it touches the bundle; nobody's host does.
pub fn stream_waits_for_a_bundle(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let mut share = memory.ipc.bundle();
    let layout = TensorLayout::contiguous(Dtype::F32, [COUNT as u64])?;
    share.owned("weights", memory.buffer.clone(), Some(layout))?;
    let share = share.start()?;
    let read = Command::TensorBytes { name: "r.b".into(), tensor: "weights".into() };
    channel.send(Message::new().bundle(&share).ready_on(&memory.stream), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_bundle(&mut agent, "r", Some(Place::Stream(0)))?;
    agent.must(&read)?;
    let mut expected = OLD;
    while_delayed("sending, receiving and opening", |delay| {
        expected += 1.0;
        let begun = Instant::now();
        memory.stream.delay(delay)?;
        memory.add(1.0)?;
        channel.send(Message::new().bundle(&share).ready_on(&memory.stream), PATIENCE)?;
        receive(&mut agent, "r")?;
        open_bundle(&mut agent, "r", Some(Place::Stream(0)))?;
        let seen = Seen::since(begun, Ok(()));
        let verdict = match agent.must(&read)? {
            Answer::Bytes(bytes) => {
                same(&bytes, &float_bytes(&[expected; COUNT]), "the floats behind the wait")
            }
            other => fail(format!("the agent answered {other:?}")),
        };
        Ok(Seen { verdict, ..seen })
    })
}

/// A map holds for every device of a bundle, and the answer takes its inverse.
pub fn bundle_mapped_there_and_back(context: &Context) -> Outcome {
    context.two_peers()?;
    if !context.backend().peer_access(0.into(), 1.into())? {
        return skip("needs peer access in both directions");
    }
    let (channel, mut agent) = pair_mapped(context, &[(0, 1), (1, 0)], &[])?;
    let (share, _dropped) = bundle(context, &[0, 1])?;
    channel.send(Message::new().bundle(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    for (place, kind) in [(Place::Home, "InvalidDeviceMap"), (Place::Stream(0), "WrongStream")] {
        let (name, of) = ("no".to_owned(), "r".to_owned());
        let open = Command::OpenReceivedBundle { name, of, index: 0, place: Some(place), timeout: PATIENCE };
        refused(agent.tell(&open)?.result, "opening where the map does not say", kind, &["device 1"])?;
    }
    open_bundle(&mut agent, "r", None)?;
    has_tensors(&mut agent, "r", 4)?;
    agent.allocate("y", 0, &bytes_of_tensor(0))?;
    agent.allocate("z", 1, &bytes_of_tensor(1))?;
    let tensor = |memory: usize| BundledTensor {
        name: format!("t{memory}"),
        memory,
        offset: 0,
        dtype: "uint8".into(),
        shape: vec![BYTES as u64],
    };
    let sharing = BundleSharing {
        memories: vec![("y".into(), None), ("z".into(), None)],
        tensors: vec![tensor(0), tensor(1)],
        ..Default::default()
    };
    agent.must(&Command::ShareBundle { name: "b".into(), sharing })?;
    let (of, bytes) = ("r".into(), Vec::new());
    agent.must(&Command::Answer { of, bytes, tensors: vec!["b".into()], timeout: PATIENCE })?;
    let received = channel.receive(PATIENCE)?;
    let [answer] = received.bundles() else { return fail("the answer should hold one bundle") };
    let opened = answer.open().mapped()?;
    for (index, (home, elsewhere)) in answer.descriptor().homes().zip([1, 0]).enumerate() {
        let device = answer.device(home).map(|device| device.get());
        equal(device, Some(elsewhere), format!("the device that the map says for part {index}"))?;
        let tensor = opened.tensor(&format!("t{index}"))?;
        equal(tensor.device().get(), elsewhere, format!("where part {index} was opened"))?;
        let stream = context.ipc().create_stream(elsewhere)?;
        same(
            &tensor_bytes(&tensor, &stream)?,
            &bytes_of_tensor(index),
            format!("the bytes of part {index}"),
        )?;
    }
    Ok(())
}

/// Where one of its devices is not mapped, a bundle is refused where it is sent, and nothing is kept of the others.
pub fn bundle_on_a_device_that_is_not_mapped(context: &Context) -> Outcome {
    let [_, second] = context.two_devices()?;
    let (channel, mut agent) = pair_mapped(context, &[(0, 0)], &[])?;
    let (share, dropped) = bundle(context, &[0, 1])?;
    let (home, pid) = (second.identity.to_string(), agent.peer().id().to_string());
    let sent = channel.send(Message::new().bundle(&share), PATIENCE);
    refused(sent, "a bundle that is not all mapped", "NotInDeviceMap", &[&home, &pid, "device_map"])?;
    equal(share.holders().iter().len(), 0, "holders of a bundle that was not sent")?;
    drop(share);
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when its export is"))
}

/// Both ends in this process: a bundle is opened by its addresses.
pub fn bundle_in_one_process(context: &Context) -> Outcome {
    let (near, far) = local_pair(context, "own-bundle")?;
    let (share, dropped) = bundle(context, &[0, 0])?;
    near.send(Message::new().bundle(&share).bundle(&share), PATIENCE)?;
    drop(share);
    let received = far.receive(PATIENCE)?;
    let stream = context.ipc().create_stream(0)?;
    let opened = received.bundles()[0].open().on(&stream)?;
    for (index, (_, tensor)) in opened.iter().enumerate() {
        same(
            &tensor_bytes(&tensor, &stream)?,
            &bytes_of_tensor(index),
            format!("the bytes of tensor {index}"),
        )?;
    }
    drop(opened);
    is_kept(&dropped[0], "by the bundle that was not opened")?;
    let (_, bundles) = received.into_parts();
    drop((near, far));
    drop(bundles);
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when both have gone"))
}

fn copy(agent: &mut Agent, copying: Copying, place: Place) -> Result<Mapped, Stop> {
    match agent.must(&Command::CopyReceived { name: "copy".into(), of: "r".into(), copying, place })? {
        Answer::Mapping(mapped) => Ok(mapped),
        other => fail(format!("the agent answered {other:?}")),
    }
}

/// A copy has what the sender's stream wrote before it sent, also on a stream, and uses the grant up.
pub fn copied_when_it_is_ready(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let mut expected = OLD;
    for place in [Place::Home, Place::Stream(0)] {
        expected += 1.0;
        let memory = Memory::with_floats(context, COUNT)?;
        let (owner, dropped) = Witness::of(&memory);
        let share = memory.ipc.share(unchecked::owned(owner, memory.buffer.region())).start()?;
        memory.stream.delay(SHORT)?;
        memory.add(expected - OLD)?;
        channel.send(Message::new().tensor(&share).ready_on(&memory.stream), PATIENCE)?;
        drop(share);
        receive(&mut agent, "r")?;
        is_kept(&dropped, "by a message that has not been opened")?;
        let mapped = copy(&mut agent, Copying::Always, place)?;
        equal((mapped.is_copy, mapped.device), (true, 0), "whether it is a copy, and its device")?;
        is_dropped(&dropped, "when it has been copied")?;
        same(&agent.floats("copy")?, &[expected; COUNT], "the floats of the copy")?;
    }
    Ok(())
}

/// Where the device cannot reach the memory it is copied, if that was allowed; else it is opened.
pub fn copied_where_it_cannot_be_opened(context: &Context) -> Outcome {
    let [first, second] = context.two_devices()?;
    let reaches = context.backend().peer_access(second.ordinal, first.ordinal)?;
    let (channel, mut agent) = pair(context)?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    channel.send(Message::new().tensor(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    if !reaches {
        let (name, of) = ("copy".to_owned(), "r".to_owned());
        let open = Command::CopyReceived { name, of, copying: Copying::Never, place: Place::Device(1) };
        refused(agent.tell(&open)?.result, "opening without peer access", "NoPeerAccess", &["or_staged"])?;
        is_kept(&dropped, "after an open that failed")?;
    }
    let mapped = copy(&mut agent, Copying::IfNeeded, Place::Device(1))?;
    equal((mapped.is_copy, mapped.device), (!reaches, 1), "whether it is a copy, and its device")?;
    same(&agent.bytes("copy")?, &bytes, "the bytes on the other device")
}
