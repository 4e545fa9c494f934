//! Events of the bare backend: record here, wait there.

use std::time::Duration;

use device_ipc_core::backend::DeviceEvent;
use device_ipc_core::{AsStream, DeviceOrdinal, Error};

use crate::agent::{Agent, Command, Place};
use crate::check::{refused, same, that};
use crate::flows::{Memory, OLD, SOON};
use crate::gate::Gate;
use crate::{Context, Outcome, Stop};

const COUNT: usize = 1024;

/// A timeout that a stream with a closed gate outlasts.
const SHORT: Duration = Duration::from_millis(50);

/// An event of device 0, open as "e" in another process that is quick to answer.
fn event_and_agent(context: &Context) -> Result<(Box<dyn DeviceEvent>, Agent), Stop> {
    context.needs_events()?;
    let event = context.backend().create_event(DeviceOrdinal::new(0))?;
    let mut agent = context.agent()?;
    agent.prepare(0)?;
    let handle = event.export()?.as_slice().to_vec();
    agent.must(&Command::OpenEvent { name: "e".into(), handle, device: 0 })?;
    Ok((event, agent))
}

fn reached_there(agent: &mut Agent) -> Result<bool, Stop> {
    agent.get(&Command::QueryEvent { name: "e".into() })
}

/// An event that was never recorded counts as reached, on both sides: nothing waits for it for ever.
pub fn never_recorded_is_reached(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    that(event.query()?, "an event that was never recorded counts as reached, where it was made")?;
    event.synchronize(SOON)?;
    event.wait_on(stream.as_stream())?;
    stream.synchronize()?;
    that(reached_there(&mut agent)?, "an event that was never recorded counts as reached, where it was opened")?;
    agent.must(&Command::WaitEvent { name: "e".into(), device: 0 })?;
    agent.synchronize(0)
}

/// Recorded here behind a gate, the event is open in both processes until the stream has got there.
pub fn recorded_here_queried_there(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    let gate = Gate::close(&stream)?;
    event.record(stream.as_stream())?;
    let (here, there) = (event.query()?, reached_there(&mut agent)?);
    that(!here && !there, format!("reached too early: here {here}, there {there}"))?;
    gate.open_soon();
    agent.must(&Command::SynchronizeEvent { name: "e".into(), timeout: SOON })?;
    gate.was_passed("waiting on the host")?;
    gate.open("a query")?;
    that(event.query()? && reached_there(&mut agent)?, "an event that was waited for should be reached")
}

/// A wait on the host gives up in time.
pub fn host_wait_times_out(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    let gate = Gate::close(&stream)?;
    event.record(stream.as_stream())?;
    let there = agent.request(&Command::SynchronizeEvent { name: "e".into(), timeout: SHORT })?;
    let here = event.synchronize(SHORT);
    gate.open("a wait with a timeout")?;
    refused(there.result, "a short wait in the other process", "Timeout", &[])?;
    refused(here, "a short wait", "Timeout", &[])
}

/// A stream of the other process waits for the record on the device; without the wait it reads what was there before.
pub fn stream_waits_for_a_record_of_another_process(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    // Both until the end: while a driver frees memory, it may hold up other calls until the stream is idle.
    let memories = [Memory::with_floats(context, COUNT)?, Memory::with_floats(context, COUNT)?];
    for (memory, waits) in memories.iter().zip([true, false]) {
        let share = memory.share()?;
        agent.open("m", share.descriptor(), Place::Stream(0))?;
        let gate = Gate::close(&memory.stream)?;
        memory.add(1.0)?;
        event.record(memory.stream.as_stream())?;
        if waits {
            agent.must(&Command::WaitEvent { name: "e".into(), device: 0 })?;
            gate.open("submitting a wait")?;
            same(&agent.floats("m")?, &[OLD + 1.0; COUNT], "the floats that a stream reads which waits")?;
        } else {
            let floats = agent.floats("m")?;
            gate.open("reading on another stream")?;
            same(&floats, &[OLD; COUNT], "the floats that a stream reads which never waits")?;
        }
        memory.stream.synchronize()?;
        agent.drop_mapping("m")?;
    }
    Ok(())
}

/// Recorded by the process that opened it, waited for by the one that made it.
pub fn recorded_there_waited_for_here(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    agent.close_gate(0)?;
    agent.must(&Command::RecordEvent { name: "e".into(), device: 0 })?;
    event.wait_on(stream.as_stream())?;
    let recorded = context.backend().create_event(DeviceOrdinal::new(0))?;
    recorded.record(stream.as_stream())?;
    let early = recorded.synchronize(SHORT);
    agent.open_gates("submitting a wait")?;
    refused(early, "a stream that waits for the record", "Timeout", &[])?;
    Ok(stream.synchronize()?)
}

/// A wait takes the record that was the last at the time of the call; a later record does not hold it up.
pub fn wait_takes_the_last_record(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    event.record(stream.as_stream())?;
    stream.synchronize()?;
    agent.must(&Command::WaitEvent { name: "e".into(), device: 0 })?;
    let gate = Gate::close(&stream)?;
    event.record(stream.as_stream())?;
    agent.synchronize(0)?;
    gate.open_soon();
    agent.must(&Command::SynchronizeEvent { name: "e".into(), timeout: SOON })?;
    gate.was_passed("a later wait, for the later record,")?;
    gate.open("a stream that waits for an earlier record")
}

/// One event is recorded and awaited repeatedly.
pub fn recorded_again(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    agent.open("m", share.descriptor(), Place::Stream(0))?;
    for round in 1..=20_u8 {
        let gate = Gate::close(&memory.stream)?;
        memory.add(1.0)?;
        event.record(memory.stream.as_stream())?;
        agent.must(&Command::WaitEvent { name: "e".into(), device: 0 })?;
        gate.open("submitting a wait")?;
        let expected = [OLD + f32::from(round); COUNT];
        same(&agent.floats("m")?, &expected, format!("the floats in round {round}"))?;
    }
    Ok(())
}

/// An event that was opened from another process has no handle of its own.
pub fn opened_event_is_not_exported_again(context: &Context) -> Outcome {
    let (_event, mut agent) = event_and_agent(context)?;
    let exported = agent.request(&Command::ExportEvent { name: "e".into() })?;
    refused(exported.result, "exporting an event that was opened", "Unsupported", &[])
}

/// Bytes that are no event's handle are refused.
pub fn garbage_is_no_event(context: &Context) -> Outcome {
    context.needs_events()?;
    let device = DeviceOrdinal::new(0);
    let len = context.backend().create_event(device)?.export()?.as_slice().len();
    for garbage in [Vec::new(), vec![0xa5], vec![0xa5; len], vec![0; len], vec![0xff; len + 1]] {
        let what = format!("an event of {} bytes of garbage", garbage.len());
        match context.backend().open_event(&garbage, device) {
            Ok(_) => return crate::fail(format!("{what} was opened")),
            Err(error) => that(!error.to_string().is_empty(), format!("{what} was refused without a word"))?,
        }
    }
    Ok(())
}

/// An event of this process alone, also without interprocess events, orders two streams.
pub fn local_event_orders_streams(context: &Context) -> Outcome {
    let device = DeviceOrdinal::new(0);
    let event = context.backend().create_local_event(device);
    if matches!(event, Err(Error::Unsupported { .. })) {
        // Only a backend without any refuses.
        context.needs_events()?;
    }
    let event = event?;
    that(event.query()?, "an event that was never recorded counts as reached")?;
    let [first, second] = [context.ipc().create_stream(0)?, context.ipc().create_stream(0)?];
    let gate = Gate::close(&first)?;
    event.record(first.as_stream())?;
    event.wait_on(second.as_stream())?;
    // The wait is for the record before it, and the query for this one.
    event.record(second.as_stream())?;
    let is_reached = event.query()?;
    gate.open("two records and a wait")?;
    that(!is_reached, "the second record was reached before the first one")?;
    Ok(event.synchronize(SOON)?)
}

/// An event of one card is not recorded on another one's stream, nor on another backend's. Another card's stream may
/// wait for it, as with both vendors, or is refused.
pub fn stream_of_another_device(context: &Context) -> Outcome {
    context.needs_events()?;
    let event = context.backend().create_event(DeviceOrdinal::new(0))?;
    let other = crate::unchecked::stream_of_another_backend();
    that(event.record(other).is_err(), "a record on another backend's stream should be refused")?;
    context.two_devices()?;
    let stream = context.ipc().create_stream(1)?;
    refused(event.record(stream.as_stream()), "a record on another device", "WrongStream", &["device 1", "device 0"])?;
    let home = context.ipc().create_stream(0)?;
    let gate = Gate::close(&home)?;
    event.record(home.as_stream())?;
    match event.wait_on(stream.as_stream()) {
        Ok(()) => {
            gate.open_soon();
            stream.synchronize()?;
            gate.was_passed("a stream of another device")
        }
        error => refused(error, "a wait of another device", "WrongStream", &["device 1", "device 0"]),
    }
}
