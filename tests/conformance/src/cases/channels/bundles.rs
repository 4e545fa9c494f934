//! Bundles in messages.

use std::sync::mpsc::Receiver;

use device_ipc_core::{Export, DeviceOwner, Dtype, Message, TensorLayout};

use super::{
    BYTES, COUNT, discard, is_dropped, is_kept, local_pair, mapped, open_at, opening, pair, receive,
    says_nothing_else,
};
use crate::agent::{Agent, Command, Place};
use crate::check::{refused, same};
use crate::flows::{Memory, OLD, SOON, Witness, float_bytes, pattern, tensor_bytes};
use crate::gate::Gate;
use crate::{Context, Outcome, PATIENCE, Stop, unchecked};

/// A bundle of two tensors of bytes on each of these devices, `t0` and so on, with owners that report their drops.
pub(super) fn bundle(
    context: &Context,
    devices: &[u32],
) -> Result<(Export, Vec<Receiver<()>>), Stop> {
    let (ipc, mut dropped) = (context.ipc(), Vec::new());
    let mut bundle = ipc.tensors();
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
    Ok((ipc.share_all(bundle).start()?, dropped))
}

pub(super) fn bytes_of_tensor(index: usize) -> Vec<u8> {
    pattern(BYTES + index)[index..].to_vec()
}

/// Opens the named tensors at this index of a message that the agent has received.
pub(super) fn open_tensors(agent: &mut Agent, of: &str, index: usize, place: Option<Place>) -> Outcome {
    mapped(agent, &opening(&format!("{of}.b"), of, index, place)).map(drop)
}

/// The agent has these tensors, as they were written.
pub(super) fn has_tensors(agent: &mut Agent, of: &str, count: usize) -> Outcome {
    for index in 0..count {
        let tensor = format!("t{index}");
        let read = Command::TensorBytes { name: format!("{of}.b"), tensor: tensor.clone() };
        same(&agent.get::<Vec<u8>>(&read)?, &bytes_of_tensor(index), tensor)?;
    }
    Ok(())
}

fn release_tensors(agent: &mut Agent, of: &str, device: u32) -> Outcome {
    agent.must(&Command::Release { name: format!("{of}.b"), device: Some(device) }).map(drop)
}

/// A bundle over two devices has a grant for each, and keeps the memory of both until it has been released.
pub fn bundle_of_two_devices(context: &Context) -> Outcome {
    context.two_devices()?;
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = bundle(context, &[0, 1])?;
    let memory = Memory::with_bytes(context, 0, &pattern(BYTES))?;
    let tensor = memory.share()?;
    channel.send(Message::new().export(&tensor).export(&share).export(&tensor), PATIENCE)?;
    drop((share, tensor));
    receive(&mut agent, "r")?;
    dropped.iter().try_for_each(|dropped| is_kept(dropped, "by a message that has not been opened"))?;
    open_tensors(&mut agent, "r", 1, Some(Place::Home))?;
    has_tensors(&mut agent, "r", 4)?;
    open_at(&mut agent, "r", 2, Some(Place::Home))?;
    same(&agent.bytes("r.2")?, &pattern(BYTES), "the bytes of the tensor behind the bundle")?;
    discard(&mut agent, "r")?;
    is_kept(&dropped[0], "by a mapping")?;
    release_tensors(&mut agent, "r", 1)?;
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when the mapping has gone"))
}

/// A bundle that no process opens is returned: by a drop of the message, and by the receiver's death.
pub fn unopened_bundle_goes_back(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, dropped) = bundle(context, &[0])?;
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    is_kept(&dropped[0], "by a message")?;
    discard(&mut agent, "r")?;
    is_dropped(&dropped[0], "when the message has been")?;
    let (share, dropped) = bundle(context, &[0])?;
    channel.send(Message::new().export(&share), PATIENCE)?;
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
    channel.send(Message::new().export(&share), PATIENCE)?;
    drop(share);
    receive(&mut agent, "r")?;
    let nowhere = agent.request(&opening("r.b", "r", 0, Some(Place::Device(4711))))?.result;
    refused(nowhere, "an open on a device that is not there", "InBundle", &["4711", "t0"])?;
    is_kept(&dropped[1], "after an open that failed")?;
    open_tensors(&mut agent, "r", 0, Some(Place::Home))?;
    has_tensors(&mut agent, "r", 4)
}

/// A bundle that goes there and back: once it is open there, nothing is said but the messages.
pub fn bundle_round_trips_cost_no_other_message(context: &Context) -> Outcome {
    let (channel, mut agent) = pair(context)?;
    let (share, _dropped) = bundle(context, &[0, 0])?;
    says_nothing_else((&channel, &mut agent), 100, || Message::new().export(&share))?;
    share.close(SOON)?;
    Ok(())
}

/// The receiver's stream waits for the sender's before it accesses the bundle; no host waits.
pub fn stream_waits_for_a_bundle(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (channel, mut agent) = pair(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let mut share = memory.ipc.tensors();
    let layout = TensorLayout::contiguous(Dtype::F32, [COUNT as u64])?;
    share.owned("weights", memory.buffer.clone(), Some(layout))?;
    let share = memory.ipc.share_all(share).start()?;
    let read = Command::TensorBytes { name: "r.b".into(), tensor: "weights".into() };
    channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_tensors(&mut agent, "r", 0, Some(Place::Stream(0)))?;
    agent.must(&read)?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    channel.send(Message::new().export(&share).ready_on(&memory.stream), PATIENCE)?;
    receive(&mut agent, "r")?;
    open_tensors(&mut agent, "r", 0, Some(Place::Stream(0)))?;
    gate.open("sending, receiving and opening")?;
    let bytes: Vec<u8> = agent.get(&read)?;
    same(&bytes, &float_bytes(&[OLD + 1.0; COUNT]), "the floats behind the wait")
}

/// Both sides in this process: a bundle is opened by its addresses.
pub fn bundle_in_one_process(context: &Context) -> Outcome {
    let (near, far) = local_pair(context, "own-bundle")?;
    let (share, dropped) = bundle(context, &[0, 0])?;
    near.send(Message::new().export(&share).export(&share), PATIENCE)?;
    drop(share);
    let received = far.receive(PATIENCE)?;
    let stream = context.ipc().create_stream(0)?;
    let opened = received.exports()[0].open().on(&stream)?;
    for (index, (_, tensor)) in opened.tensors().enumerate() {
        same(
            &tensor_bytes(&tensor, &stream)?,
            &bytes_of_tensor(index),
            format!("the bytes of tensor {index}"),
        )?;
    }
    drop(opened);
    is_kept(&dropped[0], "by the bundle that was not opened")?;
    let bundles = received.into_exports();
    drop((near, far));
    drop(bundles);
    dropped.iter().try_for_each(|dropped| is_dropped(dropped, "when both have gone"))
}
