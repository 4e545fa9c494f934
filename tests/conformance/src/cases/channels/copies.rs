//! Copies of what a message brings.

use device_ipc_core::{DeviceOwner, Message};

use super::bundles::{bundle, has_tensors};
use super::{BYTES, COUNT, SHORT, is_dropped, is_kept, pair, receive, witnessed};
use crate::agent::{Agent, Command, Copying, Mapped, Place};
use crate::check::{equal, refused, same};
use crate::flows::{Memory, OLD, Witness, pattern};
use crate::{Context, Outcome, PATIENCE, Stop, unchecked};

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
        memory.stream.delay(SHORT)?;
        memory.add(expected - OLD)?;
        channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
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
        refused(agent.request(&open)?.result, "opening without peer access", "NoPeerAccess", &["or_staged"])?;
        is_kept(&dropped, "after an open that failed")?;
    }
    let mapped = copy(&mut agent, Copying::IfNeeded, Place::Device(1))?;
    equal((mapped.is_copy, mapped.device), (!reaches, 1), "whether it is a copy, and its device")?;
    same(&agent.bytes("copy")?, &bytes, "the bytes on the other device")
}
