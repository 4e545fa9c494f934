//! Copies of what a message brings.

use std::time::Duration;

use device_ipc_core::{CopyPolicy, DeviceOwner, Message};

use super::bundles::{bundle, bytes_of_tensor, has_tensors};
use super::{BYTES, COUNT, is_dropped, is_kept, local_pair, pair, receive, witnessed};
use crate::agent::{Agent, Command, Copying, Mapped, Place};
use crate::check::{equal, refused, same};
use crate::flows::{Memory, OLD, Witness, pattern, tensor_bytes};
use crate::gate::Gate;
use crate::{Context, Outcome, PATIENCE, Stop, skip, unchecked};

/// The command that opens the first tensor of a message.
fn copy_of_first(name: String, of: String, copying: Copying, place: Place) -> Command {
    Command::OpenReceived { of, name, place: Some(place), index: 0, timeout: None, copying }
}

fn copy(agent: &mut Agent, copying: Copying, place: Place) -> Result<Mapped, Stop> {
    agent.get(&copy_of_first("copy".into(), "r".into(), copying, place))
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
        let gate = Gate::close(&memory.stream)?;
        memory.add(expected - OLD)?;
        gate.open_soon();
        channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
        drop(share);
        receive(&mut agent, "r")?;
        is_kept(&dropped, "by a message that has not been opened")?;
        let mapped = copy(&mut agent, Copying::Always, place)?;
        gate.was_passed("a copy")?;
        equal((mapped.is_copy, mapped.device), (true, 0), "whether it is a copy, and its device")?;
        is_dropped(&dropped, "when it has been copied")?;
        same(&agent.floats("copy")?, &[expected; COUNT], "the floats of the copy")?;
    }
    Ok(())
}

/// Named tensors are copied by the grants of the message, also after the sender has dropped the export.
pub fn named_tensors_are_copied(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = bundle(context, &[0, 0])?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    let open = copy_of_first("r.b".into(), "r".into(), Copying::Always, Place::Stream(0));
    let mapped: Mapped = agent.get(&open)?;
    equal((mapped.is_copy, mapped.tensors), (true, Some(4)), "whether it is a copy, and its tensors")?;
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when it has been copied"))?;
    has_tensors(&mut agent, "r", 4)
}

/// Only the tensors that the device cannot reach are copied, and each grant is used once, also after the drop of the export.
pub fn bundle_is_copied_in_part(context: &Context) -> Outcome {
    let [first, second] = context.two_devices()?;
    let reaches = context.backend().peer_access(first.ordinal, second.ordinal)?;
    let (channel, mut agent) = pair(context)?;
    for place in [Place::Device(0), Place::Stream(0)] {
        let (share, dropped) = bundle(context, &[0, 1])?;
        channel.send(Message::new().export(&share), PATIENCE)?;
        drop(share);
        receive(&mut agent, "r")?;
        let open = copy_of_first("r.b".into(), "r".into(), Copying::IfNeeded, place);
        let mapped: Mapped = agent.get(&open)?;
        equal((mapped.is_copy, mapped.tensors), (!reaches, Some(4)), "whether it is a copy, and its tensors")?;
        if reaches {
            is_kept(&dropped[1], "by a mapping")?;
        } else {
            is_dropped(&dropped[1], "when it has been copied")?;
        }
        is_kept(&dropped[0], "by a mapping")?;
        has_tensors(&mut agent, "r", 4)?;
        agent.drop_mapping("r.b")?;
        let opened = if reaches { &dropped[..] } else { &dropped[..1] };
        opened.iter().try_for_each(|dropped| is_dropped(dropped, "when the mapping has gone"))?;
    }
    Ok(())
}

/// An open that times out before the sender's stream has written the tensors leaves the grants of all parts.
pub fn bundle_not_ready_for_a_copy_can_be_opened_later(context: &Context) -> Outcome {
    let [first, second] = context.two_devices()?;
    if context.backend().peer_access(first.ordinal, second.ordinal)? {
        return skip("device 0 has peer access to device 1");
    }
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let (share, dropped) = bundle(context, &[0, 1])?;
    let gate = Gate::close(&memory.stream)?;
    channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    let open = |timeout| Command::OpenReceived {
        of: "r".into(),
        name: "r.b".into(),
        place: Some(Place::Stream(0)),
        index: 0,
        timeout: Some(timeout),
        copying: Copying::IfNeeded,
    };
    let early = agent.request(&open(Duration::from_millis(50)))?.result;
    gate.open("sending, receiving and opening")?;
    refused(early, "a copy of tensors that are not ready", "Timeout", &[])?;
    dropped.iter().try_for_each(|dropped| is_kept(dropped, "after an open that timed out"))?;
    agent.must(&open(PATIENCE))?;
    has_tensors(&mut agent, "r", 4)
}

/// Within one process, tensors for another device are copied by their grant, also after the drop of the export.
pub fn bundle_is_copied_within_one_process(context: &Context) -> Outcome {
    context.two_devices()?;
    let (near, far) = local_pair(context, "own-copy")?;
    let (share, dropped) = bundle(context, &[0])?;
    near.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    let received = far.receive(PATIENCE)?;
    let refusal = received.exports()[0].open().on_device(1);
    refused(refusal, "memory of the same process on another device", "InBundle", &["StagedIfNeeded"])?;
    is_kept(&dropped[0], "after an open that failed")?;
    let mapping = received.exports()[0].open().copy(CopyPolicy::StagedIfNeeded).on_device(1)?;
    equal((mapping.is_copy(), mapping.device().get()), (true, 1), "whether it is a copy, and its device")?;
    is_dropped(&dropped[0], "when it has been copied")?;
    let stream = context.ipc().create_stream(1)?;
    for index in 0..2 {
        let tensor = mapping.get(&format!("t{index}"))?;
        same(&tensor_bytes(&tensor, &stream)?, &bytes_of_tensor(index), format!("t{index}"))?;
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
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    if !reaches {
        let (name, of) = ("copy".to_owned(), "r".to_owned());
        let open = copy_of_first(name, of, Copying::Never, Place::Device(1));
        refused(agent.request(&open)?.result, "opening without peer access", "NoPeerAccess", &["StagedIfNeeded"])?;
        is_kept(&dropped, "after an open that failed")?;
    }
    let mapped = copy(&mut agent, Copying::IfNeeded, Place::Device(1))?;
    equal((mapped.is_copy, mapped.device), (!reaches, 1), "whether it is a copy, and its device")?;
    same(&agent.bytes("copy")?, &bytes, "the bytes on the other device")
}
