//! Whether the bytes are there yet. "Opened" says nothing about that: the wait belongs to the descriptor, and happens on
//! the device. Each claim has its control: the same without the wait, where the old bytes are read.

use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::{DeviceOrdinal, Mapping, Stream};

use crate::agent::{Agent, Command, Opening, Place, Sharing};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, float_bytes};
use crate::gate::Gate;
use crate::{Context, Outcome, Stop, skip};

const COUNT: usize = 4096;
const NEW: f32 = OLD + 1.0;

/// A timeout that a stream with a closed gate outlasts.
const SHORT: Duration = Duration::from_millis(100);

/// Has the memory changed by its stream, behind a gate.
fn change_behind_gate(memory: &Memory) -> Result<Gate, Stop> {
    let gate = Gate::close(&memory.stream)?;
    memory.add(NEW - OLD)?;
    Ok(gate)
}

fn share_ready(memory: &Memory) -> Result<device_ipc_core::Export, Stop> {
    Ok(memory.ipc.share(Arc::clone(&memory.buffer)).ready_on(&memory.stream).start()?)
}

/// The receiver's stream waits for the sender's on the device: the open returns before the bytes are written, and what
/// the stream then reads are the new ones.
pub fn stream_waits_for_ready(context: &Context) -> Outcome {
    context.needs_events()?;
    waits_on_a_stream(context, Place::Stream(0), 0)
}

/// The same on another card than the bytes' home.
pub fn stream_of_another_device_waits_for_ready(context: &Context) -> Outcome {
    context.needs_events()?;
    context.two_peers()?;
    waits_on_a_stream(context, Place::Stream(1), 1)
}

/// The bytes of one card are written by a stream of another one, and the receiver waits for that at their home; in
/// another process and in the exporter's own.
pub fn ready_on_a_stream_of_another_device(context: &Context) -> Outcome {
    context.needs_events()?;
    context.two_peers()?;
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    let writer = context.ipc().create_stream(1)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let gate = Gate::close(&writer)?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).ready_on(&writer).start()?;
    receiver.open("m", share.descriptor(), Place::Stream(0))?;
    let own = memory.ipc.open(share.descriptor()).on(&memory.stream)?;
    gate.open_soon();
    receiver.synchronize(0)?;
    gate.was_passed("the receiver's stream, for one of device 1,")?;
    gate.open("opening on a stream")?;
    let gate = Gate::close(&writer)?;
    let again = memory.ipc.share(Arc::clone(&memory.buffer)).ready_on(&writer).start()?;
    let own_again = memory.ipc.open(again.descriptor()).on(&memory.stream)?;
    gate.open_soon();
    memory.stream.synchronize()?;
    gate.was_passed("the exporter's stream, for one of device 1,")?;
    drop(own_again);
    same(&receiver.floats("m")?, &[OLD; COUNT], "the floats after the wait")?;
    drop(own);
    receiver.drop_mapping("m")?;
    Ok(share.wait_released(SOON)?)
}

fn waits_on_a_stream(context: &Context, place: Place, device: u32) -> Outcome {
    let mut receiver = context.agent()?;
    receiver.prepare(device)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let gate = change_behind_gate(&memory)?;
    let share = share_ready(&memory)?;
    receiver.open("m", share.descriptor(), place)?;
    gate.open("opening on a stream")?;
    same(&receiver.floats("m")?, &[NEW; COUNT], "the floats that the waiting stream reads")
}

/// The control: without the wait the old bytes are read. Were this to fail, the case above would prove nothing.
pub fn without_ready_the_old_bytes_are_read(context: &Context) -> Outcome {
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    receiver.open("m", share.descriptor(), Place::Stream(0))?;
    let gate = change_behind_gate(&memory)?;
    let before = receiver.floats("m")?;
    gate.open("reading without a wait")?;
    same(&before, &[OLD; COUNT], "the floats without a wait")?;
    memory.stream.synchronize()?;
    same(&receiver.floats("m")?, &[NEW; COUNT], "the floats once the sender is done")
}

/// Opened without a stream, the bytes are ready when the open returns.
pub fn host_waits_for_ready(context: &Context) -> Outcome {
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let gate = change_behind_gate(&memory)?;
    gate.open_soon();
    let share = share_ready(&memory)?;
    receiver.open("m", share.descriptor(), Place::Home)?;
    gate.was_passed("opening without a stream")?;
    same(&receiver.floats("m")?, &[NEW; COUNT], "the floats after the open")
}

/// The wait on the host fails when the timeout comes first, and leaves no lease behind.
pub fn host_wait_times_out(context: &Context) -> Outcome {
    context.needs_events()?;
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let gate = change_behind_gate(&memory)?;
    let share = share_ready(&memory)?;
    let result = receiver.try_open("m", Opening::new(share.descriptor(), Place::Home).timeout(SHORT))?;
    gate.open("a timeout")?;
    refused(result.map(drop), "opening before the bytes are ready", "Timeout", &["timed out after"])?;
    Ok(share.close(SOON)?)
}

/// Each stream that takes a view waits, not only the one that opened.
pub fn views_wait_for_ready(context: &Context) -> Outcome {
    context.needs_events()?;
    let mut sender = context.agent()?;
    sender.prepare(0)?;
    let ipc = context.ipc();
    let (opener, reader) = (ipc.create_stream(0)?, ipc.create_stream(0)?);
    sender.allocate("e", 0, &float_bytes(&[OLD; COUNT]))?;
    sender.close_gate(0)?;
    sender.add("e", NEW - OLD)?;
    let descriptor = sender.share("e", Sharing { ready_on: Some(0), ..Default::default() })?;
    let mapping = ipc.open(&descriptor).on(&opener)?;
    let view = mapping.view::<f32, _>(&reader)?;
    sender.open_gates("a view on another stream")?;
    same(&view.to_vec()?, &[NEW; COUNT], "the floats that another stream reads")
}

/// A second mapping of an open export waits as the first one did.
pub fn second_mapping_waits_for_ready(context: &Context) -> Outcome {
    context.needs_events()?;
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let gate = change_behind_gate(&memory)?;
    let share = share_ready(&memory)?;
    receiver.open("first", share.descriptor(), Place::Stream(0))?;
    gate.open_soon();
    receiver.open("second", share.descriptor(), Place::Home)?;
    gate.was_passed("opening a second mapping without a stream")?;
    same(&receiver.floats("second")?, &[NEW; COUNT], "the floats of the second mapping")
}

/// In the exporting process itself the wait is the same.
pub fn own_process_waits_for_ready(context: &Context) -> Outcome {
    context.needs_events()?;
    let reader = context.ipc().create_stream(0)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let gate = change_behind_gate(&memory)?;
    let share = share_ready(&memory)?;
    let mapping = memory.ipc.open(share.descriptor()).on(&reader)?;
    gate.open("opening in one's own process")?;
    same(&mapping.view::<f32, _>(&reader)?.to_vec()?, &[NEW; COUNT], "the floats of one's own memory")
}

/// Where the device has no events that processes share, the share itself waits on the host, and says nothing wrong.
pub fn ready_without_events(context: &Context) -> Outcome {
    if context.backend().capabilities(DeviceOrdinal::new(0))?.ipc_events {
        return skip("the device has events that processes share");
    }
    let memory = Memory::with_floats(context, COUNT)?;
    let gate = change_behind_gate(&memory)?;
    gate.open_soon();
    let share = share_ready(&memory)?;
    gate.was_passed("a share without events")?;
    let mut receiver = context.agent()?;
    receiver.open("m", share.descriptor(), Place::Stream(0))?;
    same(&receiver.floats("m")?, &[NEW; COUNT], "the floats after the open")
}

/// A mapping that is dropped while device work still uses it: the lease ends when the work has finished, and the caller
/// does not wait for that. Closing under a running kernel is undefined in every driver.
pub fn drop_under_device_work(context: &Context) -> Outcome {
    ends_under_device_work(context, |receiver| receiver.drop_mapping("m").map(drop))
}

/// The same for a release on the stream.
pub fn release_under_device_work(context: &Context) -> Outcome {
    ends_under_device_work(context, |receiver| {
        let reply = receiver.request(&Command::Release { name: "m".into(), device: None })?;
        reply.result.map(drop).map_err(|refusal| Stop::failed(refusal.text))
    })
}

fn ends_under_device_work(context: &Context, end: impl Fn(&mut Agent) -> Outcome) -> Outcome {
    let mut receiver = context.agent()?;
    receiver.prepare(0)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let (share, other) = (memory.share()?, memory.share()?);
    receiver.open("m", share.descriptor(), Place::Stream(0))?;
    // Keeps the allocation open, as a driver's close may wait for the device and hide that no other call did.
    receiver.open("kept", other.descriptor(), Place::Stream(0))?;
    receiver.close_gate(0)?;
    receiver.add("m", NEW - OLD)?;
    end(&mut receiver)?;
    let early = share.wait_released(SHORT);
    receiver.open_gates("ending a mapping")?;
    that(early.is_err(), "the lease ended before the device work")?;
    share.wait_released(SOON)?;
    same(&memory.floats()?, &[NEW; COUNT], "the floats after the lease has ended")
}

/// A check holds after the death of an exporter that has written the bytes, also of a mapping that was opened before.
pub fn check_after_exporter_exit(context: &Context) -> Outcome {
    let stream = context.ipc().create_stream(0)?;
    let mut exporter = context.agent()?;
    exporter.prepare(0)?;
    exporter.allocate("m", 0, &[1; 4096])?;
    let descriptor = exporter.share("m", Sharing { ready_on: Some(0), ..Sharing::default() })?;
    exporter.synchronize(0)?;
    let mapping = context.ipc().open(&descriptor).on(&stream)?;
    mapping.check()?;
    exporter.kill()?;
    stream.synchronize()?;
    Ok(mapping.check()?)
}

/// A release on one stream does not wait for what other streams do. (Another region of the allocation stays open: a
/// driver's close may wait for the whole device.)
pub fn release_waits_for_its_stream_alone(context: &Context) -> Outcome {
    releases_beside(context, |kept, _| Ok(Some(kept)))
}

/// A release on a stream that is far from getting there holds up no other release.
pub fn late_release_holds_up_no_other(context: &Context) -> Outcome {
    releases_beside(context, |late, busy| Ok(late.release(busy).map(|()| None)?))
}

/// Releases a mapping while another stream is busy, after doing something with another mapping and that stream.
fn releases_beside(
    context: &Context,
    before: impl Fn(Mapping, &Stream) -> Result<Option<Mapping>, Stop>,
) -> Outcome {
    context.needs_events()?;
    let mut exporter = context.agent()?;
    let ipc = context.ipc();
    let (used, busy) = (ipc.create_stream(0)?, ipc.create_stream(0)?);
    let part = |offset| Sharing { offset, len: Some(1024), ..Default::default() };
    exporter.allocate("e", 0, &float_bytes(&[OLD; COUNT]))?;
    let others = [exporter.share_as("kept", "e", part(0))?, exporter.share_as("late", "e", part(1024))?];
    let [_kept, late] = [ipc.open(&others[0]).on(&used)?, ipc.open(&others[1]).on(&used)?];
    let descriptor = exporter.share_as("used", "e", part(2048))?;
    let mapping = ipc.open(&descriptor).on(&used)?;
    mapping.view_mut::<f32, _>(&used)?.add(NEW - OLD)?;
    let gate = Gate::close(&busy)?;
    let _other = before(late, &busy)?;
    mapping.release(&used)?;
    exporter.must(&Command::WaitReleased { name: "used".into(), timeout: SOON })?;
    gate.open("a release on another stream")?;
    busy.synchronize()?;
    let floats = exporter.floats("e")?;
    same(&floats[512..768], &[NEW; 256], "the floats after the release")
}

/// The event's capability is what it says: making one works where it is there, and is refused where it is not.
pub fn events_are_what_the_capability_says(context: &Context) -> Outcome {
    let device = DeviceOrdinal::new(0);
    let claimed = context.backend().capabilities(device)?.ipc_events;
    match context.backend().create_event(device) {
        Ok(event) => {
            that(claimed, "an event could be created, and the capability says no")?;
            equal(event.device(), device, "the event's device")?;
            that(!event.export()?.as_slice().is_empty(), "the handle of an event has no bytes")
        }
        error if claimed => error.map(drop).map_err(Into::into),
        error => refused(error, "an event where there are none", "Unsupported", &[context.backend().info().name]),
    }
}
