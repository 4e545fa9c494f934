//! Grants: what is sent stays until it has been opened, or comes back.

use device_ipc_core::Message;

use super::{
    BYTES, discard, is_dropped, is_kept, mapped, open_at, opening, pair, receive, said, says_nothing_else, went_well,
    witnessed,
};
use crate::agent::{Command, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, pattern};
use crate::{Context, Outcome, PATIENCE};

/// `send(t); drop(t)`: the memory stays until the receiver has opened and released it.
pub fn tensor_outlives_its_export(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    channel.send(Message::new().bytes(b"t").export(&share), PATIENCE)?;
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

/// Unopened tensors are returned: by a drop of the message, and by closing the channel before reading it.
pub fn unopened_tensor_goes_back(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = witnessed(context, &pattern(BYTES))?;
    channel.send(Message::new().export(&share).export(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    is_kept(&dropped, "by a message")?;
    discard(&mut agent, "r")?;
    is_dropped(&dropped, "when the message has been")?;
    let (share, dropped) = witnessed(context, &pattern(BYTES))?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    agent.must(&Command::DropChannel { name: "c".into() })?;
    is_dropped(&dropped, "when the receiver has closed the channel over the message")?;
    refused(channel.send(Message::new(), PATIENCE), "a send to who has closed", "ChannelClosed", &["closed"])
}

/// Both sides may close the channel: a received tensor can still be opened.
pub fn unopened_tensor_outlives_both_ends(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop((share, channel));
    receive(&mut agent, "r")?;
    agent.must(&Command::DropChannel { name: "c".into() })?;
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
    third.must(&Command::Drop { names: vec!["x".into()] })?;
    receive(&mut agent, "s")?;
    let late = agent.request(&opening("late", "s", 0, Some(Place::Home)))?.result;
    refused(late, "a descriptor whose export was dropped", "ExportDropped", &[])
}

/// An open that fails before the exporter was asked leaves the grant.
pub fn failed_open_can_be_tried_again(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let bytes = pattern(BYTES);
    let (share, dropped) = witnessed(context, &bytes)?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    let nowhere = agent.request(&opening("m", "r", 0, Some(Place::Device(4711))))?.result;
    refused(nowhere, "an open on a device that is not there", "NoSuchDevice", &["4711"])?;
    is_kept(&dropped, "after an open that failed")?;
    mapped(&mut agent, &opening("m", "r", 0, Some(Place::Home)))?;
    same(&agent.bytes("m")?, &bytes, "the bytes of the tensor")
}

/// A tensor that is sent there and back repeatedly: once it is open, no message is sent except those of the channel.
pub fn round_trips_cost_no_other_message(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let share = Memory::with_bytes(context, 0, &pattern(BYTES))?.share()?;
    says_nothing_else((&channel, &mut agent), 300, || Message::new().export(&share))?;
    // The last is known to be over when the memory is waited for.
    share.close(SOON)?;
    Ok(())
}

/// A tensor that is sent in one direction repeatedly is freed with its export.
pub fn one_way_leaves_no_grants(context: &Context) -> Outcome {
    const ROUNDS: u32 = 500;
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = witnessed(context, &pattern(BYTES))?;
    let echo = |times| Command::Echo { by: "c".into(), times, answers: false, timeout: PATIENCE };
    agent.send(&echo(1))?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    went_well(agent.receive_reply()?.result)?;
    let (asked, told) = said(&mut agent)?;
    agent.send(&echo(ROUNDS))?;
    for _ in 0..ROUNDS {
        channel.send(Message::new().export(&share), PATIENCE)?;
    }
    went_well(agent.receive_reply()?.result)?;
    let (asked_since, told_since) = said(&mut agent)?;
    equal(asked_since, asked, "requests for memory that is open already")?;
    let told = told_since - told;
    that(
        told <= u64::from(ROUNDS / 64) + 1,
        format!("the broker should hear of grants now and then, not {told} times"),
    )?;
    // An idle lease, and grants that the exporter does not know of: neither outlives the export.
    drop(share);
    is_dropped(&dropped, "when all sent exports have been opened and released")
}
