//! Events of the bare backend: record here, wait there.

use std::time::{Duration, Instant};

use device_ipc_core::backend::DeviceEvent;
use device_ipc_core::{AsStream, DeviceOrdinal};

use crate::agent::{Agent, Command, Place};
use crate::check::{refused, same, that};
use crate::flows::{Memory, OLD, SOON};
use crate::timing::{Seen, while_delayed};
use crate::{Context, Outcome, Stop};

const COUNT: usize = 1024;

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

/// Recorded here behind a delay, the event is open in both processes until the stream has got there.
pub fn recorded_here_queried_there(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    while_delayed("a query", |delay| {
        let begun = Instant::now();
        stream.delay(delay)?;
        event.record(stream.as_stream())?;
        let (here, there) = (event.query()?, reached_there(&mut agent)?);
        let seen = Seen::since(begun, that(!here && !there, format!("reached too early: here {here}, there {there}")));
        agent.must(&Command::SynchronizeEvent { name: "e".into(), timeout: SOON })?;
        let took = begun.elapsed();
        that(took >= delay, format!("waiting on the host for a delay of {delay:?} took {took:?}"))?;
        that(event.query()? && reached_there(&mut agent)?, "an event that was waited for should be reached")?;
        Ok(seen)
    })
}

/// A wait on the host gives up in time.
pub fn host_wait_times_out(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    while_delayed("a wait with a timeout", |delay| {
        let timeout = delay / 5;
        let begun = Instant::now();
        stream.delay(delay)?;
        event.record(stream.as_stream())?;
        let there = agent.request(&Command::SynchronizeEvent { name: "e".into(), timeout })?;
        let here = event.synchronize(timeout);
        let took = begun.elapsed();
        let verdict = refused(there.result, "a short wait in the other process", "Timeout", &[])
            .and_then(|()| refused(here, "a short wait", "Timeout", &[]));
        stream.synchronize()?;
        Ok(Seen { took, verdict })
    })
}

/// A stream of the other process waits for the record on the device; without the wait it reads what was there before.
pub fn stream_waits_for_a_record_of_another_process(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    for waits in [true, false] {
        while_delayed("submitting a wait", |delay| {
            let memory = Memory::with_floats(context, COUNT)?;
            let share = memory.share()?;
            agent.open("m", share.descriptor(), Place::Stream(0))?;
            let begun = Instant::now();
            memory.stream.delay(delay)?;
            memory.add(1.0)?;
            event.record(memory.stream.as_stream())?;
            if waits {
                agent.must(&Command::WaitEvent { name: "e".into(), device: 0 })?;
            }
            let submitted = begun.elapsed();
            let floats = agent.floats("m")?;
            let took = if waits { submitted } else { begun.elapsed() };
            let expected = if waits { OLD + 1.0 } else { OLD };
            let what = format!("the floats that a stream reads which {} waits", if waits { "" } else { "never" });
            memory.stream.synchronize()?;
            agent.drop_mapping("m")?;
            Ok(Seen { took, verdict: same(&floats, &[expected; COUNT], what) })
        })?;
    }
    Ok(())
}

/// Recorded by the process that opened it, waited for by the one that made it.
pub fn recorded_there_waited_for_here(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    let delay = Duration::from_millis(300);
    let begun = Instant::now();
    agent.must(&Command::Delay { device: 0, time: delay })?;
    agent.must(&Command::RecordEvent { name: "e".into(), device: 0 })?;
    event.wait_on(stream.as_stream())?;
    stream.synchronize()?;
    let took = begun.elapsed();
    that(took >= delay, format!("a stream that waits for a record behind {delay:?} was done after {took:?}"))
}

/// A wait takes the record that was the last at the time of the call; a later record does not hold it up.
pub fn wait_takes_the_last_record(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let stream = context.ipc().create_stream(0)?;
    event.record(stream.as_stream())?;
    stream.synchronize()?;
    agent.must(&Command::WaitEvent { name: "e".into(), device: 0 })?;
    while_delayed("a stream that waits for an earlier record", |delay| {
        let begun = Instant::now();
        stream.delay(delay)?;
        event.record(stream.as_stream())?;
        agent.synchronize(0)?;
        let seen = Seen::since(begun, Ok(()));
        agent.must(&Command::SynchronizeEvent { name: "e".into(), timeout: SOON })?;
        let took = begun.elapsed();
        let verdict = that(took >= delay, format!("a later wait should take the later record, and took {took:?}"));
        Ok(Seen { verdict, ..seen })
    })
}

/// One event is recorded and awaited repeatedly.
pub fn recorded_again(context: &Context) -> Outcome {
    let (event, mut agent) = event_and_agent(context)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    agent.open("m", share.descriptor(), Place::Stream(0))?;
    for round in 1..=20_u8 {
        memory.stream.delay(Duration::from_millis(2))?;
        memory.add(1.0)?;
        event.record(memory.stream.as_stream())?;
        agent.must(&Command::WaitEvent { name: "e".into(), device: 0 })?;
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
    let delay = Duration::from_millis(200);
    let begun = Instant::now();
    home.delay(delay)?;
    event.record(home.as_stream())?;
    match event.wait_on(stream.as_stream()) {
        Ok(()) => {
            stream.synchronize()?;
            let took = begun.elapsed();
            that(took >= delay, format!("a wait of another device for a record behind {delay:?} took {took:?}"))
        }
        error => refused(error, "a wait of another device", "WrongStream", &["device 1", "device 0"]),
    }
}
