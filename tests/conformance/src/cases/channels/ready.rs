//! `ready_on`: the receiver's stream waits for the sender's.

use device_ipc_core::Message;

use super::{BYTES, COUNT, open_at, open_on_stream, pair, receive, send};
use crate::agent::{Command, Place};
use crate::check::{equal, refused, same};
use crate::flows::{Memory, OLD, pattern, stream_resumes};
use crate::gate::Gate;
use crate::{Context, Outcome, PATIENCE};

/// The receiver's stream waits for the sender's; no host waits.
pub fn stream_waits_for_ready(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
    open_on_stream(&mut agent)?;
    equal(agent.floats("r.0")?[0], OLD, "the float before")?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
    open_on_stream(&mut agent)?;
    gate.open("sending, receiving and opening")?;
    same(&agent.floats("r.0")?, &[OLD + 1.0; COUNT], "the floats behind the wait")?;
    agent.must(&Command::CheckReceived { of: "r".into() }).map(drop)
}

/// A fast stream's signal does not overtake a slow one's: the first message's tensor is waited for all the same.
pub fn streams_signal_in_turn(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let fast = memory.ipc.create_stream(0)?;
    channel.send(Message::new().export(&share).ready_on(&memory.stream).ready_on(&fast), PATIENCE)?;
    open_on_stream(&mut agent)?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
    channel.send(Message::new().ready_on(&fast), PATIENCE)?;
    open_on_stream(&mut agent)?;
    receive(&mut agent, "other")?;
    gate.open("sending twice, receiving and opening")?;
    same(&agent.floats("r.0")?, &[OLD + 1.0; COUNT], "the floats behind the wait")
}

/// A receiver without a stream waits on its host; and if streams have no counters, the sender waits before it sends.
pub fn host_waits_for_ready(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    gate.open_soon();
    channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_at(&mut agent, "r", 0, Some(Place::Home))?;
    gate.was_passed("opening without a stream")?;
    same(&agent.floats("r.0")?, &[OLD + 1.0; COUNT], "the floats behind the wait")
}

/// A stream that waits for a sender that dies resumes, and the message returns an error.
pub fn sender_killed_while_a_stream_waits(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    agent.export("x", &pattern(BYTES))?;
    send(&mut agent, b"", &["x"], Some(0))?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let first = channel.receive(PATIENCE)?;
    drop(first.exports()[0].open().on(&stream)?);
    stream.synchronize()?;
    agent.close_gate(0)?;
    send(&mut agent, b"", &["x"], Some(0))?;
    let received = channel.receive(PATIENCE)?;
    let mapping = received.exports()[0].open().on(&stream)?;
    received.check()?;
    agent.kill()?;
    stream_resumes(&stream, "the sender dies")?;
    refused(received.check(), "what was never written", "PeerGone", &["terminated"])?;
    first.check()?;
    drop(mapping);
    let late = received.exports()[0].open().on(&stream);
    refused(late, "opening what was never written", "PeerGone", &[])
}
