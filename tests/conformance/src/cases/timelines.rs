//! Timelines: streams of two processes that take turns without a host that waits, and what becomes of a stream that waits
//! when the other process goes.

mod ends;
mod one_process;

use std::ops::RangeInclusive;
use std::time::Duration;

use device_ipc_core::{DeviceOrdinal, Export, Timeline};

use crate::agent::{Agent, Command, Place};
use crate::check::{equal, refused, same};
use crate::flows::{Memory, OLD, float_bytes, happens_soon, stream_resumes};
use crate::gate::Gate;
use crate::{Context, Outcome, PATIENCE, Stop, fail, skip};

pub use ends::{ends_with_the_lease, exporter_killed_while_a_stream_waits, goes_on_after_the_export_was_dropped, importer_killed_while_a_stream_waits, in_one_process_an_exporter_that_waits_goes_on, what_was_signalled_before_an_end_counts};
pub use one_process::{in_one_process, stream_of_another_backend, stream_of_another_device};

const COUNT: usize = 1024;
const SHORT: Duration = Duration::from_millis(50);

/// The value that both sides of a [`Pair`] have signalled when it begins.
const BEGUN: u64 = 1;

/// This process as the exporter, and an importer: the agent's mapping `m` with the timeline `t`. Both sides' streams have
/// signalled and waited for [`BEGUN`], so that what comes next is quick.
struct Pair {
    memory: Memory,
    share: Export,
    timeline: Timeline,
    importer: Agent,
}

impl Pair {
    fn begin(context: &Context) -> Result<Self, Stop> {
        Self::begin_on(context, Place::Home, 0)
    }

    /// With the importer's mapping in this place, on this device.
    fn begin_on(context: &Context, place: Place, device: u32) -> Result<Self, Stop> {
        let mut importer = context.agent()?;
        let memory = Memory::with_floats(context, COUNT)?;
        let share = memory.share()?;
        importer.open("m", share.descriptor(), place)?;
        importer.must(&Command::Timeline { name: "t".into(), of: Some("m".into()) })?;
        let timeline = only(share.timelines(1, PATIENCE)?)?;
        importer.must(&signal(BEGUN, device))?;
        importer.must(&wait(BEGUN, device))?;
        timeline.signal(BEGUN, &memory.stream)?;
        timeline.wait(BEGUN, &memory.stream)?;
        memory.stream.synchronize()?;
        importer.synchronize(device)?;
        Ok(Self { memory, share, timeline, importer })
    }

    /// Returns the value of this process's counter that the importer's host sees.
    fn value_at_importer(&mut self) -> Result<u64, Stop> {
        self.importer.get(&Command::Value { name: "t".into() })
    }
}

fn signal(value: u64, device: u32) -> Command {
    Command::Signal { name: "t".into(), value, device }
}

fn wait(value: u64, device: u32) -> Command {
    Command::Wait { name: "t".into(), value, device }
}

fn signal_now(value: u64) -> Command {
    Command::SignalNow { name: "t".into(), value }
}

fn wait_now(value: u64) -> Command {
    Command::WaitNow { name: "t".into(), value, timeout: PATIENCE }
}

#[track_caller]
fn only(timelines: Vec<Timeline>) -> Result<Timeline, Stop> {
    match <[Timeline; 1]>::try_from(timelines) {
        Ok([timeline]) => Ok(timeline),
        Err(others) => fail(format!("there should be one timeline, and there are {}", others.len())),
    }
}

#[track_caller]
/// The importer's stream waits for the exporter's: submitting that waits for nothing, and what the importer then reads has
/// been written.
pub fn stream_waits_for_the_exporter(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let pair = Pair::begin(context)?;
    importer_waits(pair, 0)
}

/// The same on another card than the bytes' home.
pub fn stream_of_another_device_waits_for_the_exporter(context: &Context) -> Outcome {
    context.two_peers()?;
    context.needs_timelines(2)?;
    let pair = Pair::begin_on(context, Place::Device(1), 1)?;
    importer_waits(pair, 1)
}

fn importer_waits(mut pair: Pair, device: u32) -> Outcome {
    for value in BEGUN + 1..BEGUN + 3 {
        let gate = Gate::close(&pair.memory.stream)?;
        pair.memory.add(1.0)?;
        pair.timeline.signal(value, &pair.memory.stream)?;
        pair.importer.must(&wait(value, device))?;
        gate.open("signalling and waiting on streams")?;
        let expected = OLD + (value - BEGUN) as f32;
        same(&pair.importer.floats("m")?, &[expected; COUNT], "the floats that the waiting stream reads")?;
    }
    Ok(())
}

/// The other way round: the exporter's stream waits for the importer's.
pub fn stream_waits_for_the_importer(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let mut pair = Pair::begin(context)?;
    for value in BEGUN + 1..BEGUN + 3 {
        pair.importer.close_gate(0)?;
        pair.importer.add("m", 1.0)?;
        pair.importer.must(&signal(value, 0))?;
        pair.timeline.wait(value, &pair.memory.stream)?;
        pair.importer.open_gates("signalling and waiting on streams")?;
        let expected = OLD + (value - BEGUN) as f32;
        same(&pair.memory.floats()?, &[expected; COUNT], "the floats that the waiting stream reads")?;
    }
    Ok(())
}

/// One buffer, written many times: the importer takes what it reads before the exporter writes again, and misses nothing.
/// All of the importer's rounds are submitted before the exporter's first.
pub fn many_rounds_on_one_buffer(context: &Context) -> Outcome {
    const ROUNDS: u64 = 64;
    /// The rounds in which the stream of one side is late, so that a stream of the other that does not wait would be noticed.
    const LATE_WRITER: u64 = 20;
    const LATE_READER: u64 = 40;
    context.needs_timelines(1)?;
    let Pair { memory, share: _share, timeline, mut importer } = Pair::begin(context)?;
    let kept = |round: u64| format!("kept {round}");
    for round in 1..=ROUNDS {
        importer.allocate(&kept(round), 0, &[0; COUNT * 4])?;
    }
    let submit = |importer: &mut Agent, rounds: RangeInclusive<u64>| {
        for round in rounds {
            importer.must(&wait(BEGUN + round, 0))?;
            importer.must(&Command::Keep { name: "m".into(), into: kept(round) })?;
            importer.must(&signal(BEGUN + round, 0))?;
        }
        Ok::<_, Stop>(())
    };
    submit(&mut importer, 1..=LATE_READER - 1)?;
    let mut late = None;
    for round in 1..=ROUNDS {
        if round == LATE_WRITER {
            late = Some(Gate::close(&memory.stream)?);
        }
        memory.buffer.view_mut::<u8, _>(&memory.stream)?.fill_bytes(round as u8)?;
        timeline.signal(BEGUN + round, &memory.stream)?;
        timeline.wait(BEGUN + round, &memory.stream)?;
    }
    timeline.wait_now(BEGUN + LATE_WRITER - 1, PATIENCE)?;
    if let Some(late) = late {
        late.open("submitting the rounds")?;
    }
    timeline.wait_now(BEGUN + LATE_READER - 1, PATIENCE)?;
    // Now that the reader's stream waits for nothing: to close the first gate of a process may load a kernel, and wait for the device.
    importer.close_gate(0)?;
    submit(&mut importer, LATE_READER..=ROUNDS)?;
    equal(timeline.value()?, BEGUN + LATE_READER - 1, "the last round that the importer has kept")?;
    importer.open_gates("submitting the rounds")?;
    memory.stream.synchronize()?;
    for round in 1..=ROUNDS {
        let expected = [round as u8; COUNT * 4];
        same(&importer.bytes(&kept(round))?, &expected, format!("what the importer kept of round {round}"))?;
    }
    Ok(())
}

/// Each importer has a timeline of its own, in the order in which they opened the export; the end of one is not the end of
/// the others.
pub fn each_importer_has_its_own(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let mut importers = [context.agent()?, context.agent()?, context.agent()?];
    for importer in &mut importers {
        importer.open("m", share.descriptor(), Place::Home)?;
    }
    // In another order than that of the opens.
    for index in [2, 0, 1_usize] {
        importers[index].must(&Command::Timeline { name: "t".into(), of: Some("m".into()) })?;
        importers[index].must(&signal(index as u64 + 1, 0))?;
    }
    let timelines = share.timelines(3, PATIENCE)?;
    equal(timelines.len(), 3, "the number of timelines")?;
    for (index, timeline) in timelines.iter().enumerate() {
        equal(timeline.peer(), importers[index].peer().id(), format!("the process of timeline {index}"))?;
        timeline.wait_now(index as u64 + 1, PATIENCE)?;
        equal(timeline.value()?, index as u64 + 1, format!("the value of timeline {index}"))?;
    }
    timelines[1].signal(10, &memory.stream)?;
    importers[1].must(&wait_now(10))?;
    let untouched: u64 = importers[2].get(&Command::Value { name: "t".into() })?;
    equal(
        untouched,
        0,
        "the value that another importer sees of a timeline without a signal",
    )?;
    let [first, mut second, mut third] = importers;
    first.kill()?;
    happens_soon("the end of a killed importer's timeline", || Ok(timelines[0].check().is_err()))?;
    for (importer, timeline) in [(&mut second, &timelines[1]), (&mut third, &timelines[2])] {
        timeline.check()?;
        importer.must(&signal(20, 0))?;
        timeline.wait(20, &memory.stream)?;
        memory.stream.synchronize()?;
    }
    happens_soon("an end that is no longer listed", || Ok(share.timelines(0, SHORT)?.len() == 2))
}

/// A wait for timelines times out, and the error says how many there are and what to do.
pub fn waiting_for_a_timeline_times_out(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    equal(share.timelines(0, SHORT)?.len(), 0, "the timelines of an export without an importer")?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    let none = ["after 50 ms", "0 importers", "Mapping::timeline"];
    refused(share.timelines(1, SHORT).map(drop), "a timeline that no importer has requested", "Timeout", &none)?;
    importer.must(&Command::Timeline { name: "t".into(), of: Some("m".into()) })?;
    equal(share.timelines(1, SHORT)?.len(), 1, "the timelines once the importer has asked")?;
    refused(share.timelines(2, SHORT).map(drop), "a second timeline", "Timeout", &["1 importers"])
}

/// Hosts signal and wait as streams do, and each resumes the other.
pub fn hosts_signal_and_wait(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let mut pair = Pair::begin(context)?;
    pair.importer.must(&signal_now(5))?;
    pair.timeline.wait_now(5, PATIENCE)?;
    equal(pair.timeline.value()?, 5, "the value that the importer's host has signalled")?;
    let phrases = ["value 6", "after 50 ms", "has signalled 5"];
    refused(pair.timeline.wait_now(6, SHORT), "a value that does not come", "Timeout", &phrases)?;
    // A stream waits for the importer's host, and the importer's host for the stream.
    pair.timeline.wait(6, &pair.memory.stream)?;
    pair.memory.add(1.0)?;
    pair.timeline.signal(BEGUN + 1, &pair.memory.stream)?;
    equal(pair.value_at_importer()?, BEGUN, "the value while the stream that signals it waits")?;
    pair.importer.must(&signal_now(6))?;
    pair.importer.must(&wait_now(BEGUN + 1))?;
    same(&pair.importer.floats("m")?, &[OLD + 1.0; COUNT], "the floats once the host has seen the value")
}

/// A host's signal resumes a stream, and a wait for a value that has been reached returns at once.
pub fn smaller_values_have_come(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let mut pair = Pair::begin(context)?;
    pair.importer.must(&signal(9, 0))?;
    pair.timeline.wait_now(9, PATIENCE)?;
    for value in [0, 1, 8, 9] {
        pair.timeline.wait(value, &pair.memory.stream)?;
        pair.timeline.wait_now(value, Duration::ZERO)?;
    }
    stream_resumes(&pair.memory.stream, "all its waits are satisfied")
}

/// Values grow, and stay below the value of a closed timeline. A refused value is not used up.
pub fn values_grow_and_stay_below_the_end(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let mut pair = Pair::begin(context)?;
    let (timeline, stream) = (&pair.timeline, &pair.memory.stream);
    timeline.signal(7, stream)?;
    for value in [7, 6, BEGUN, 0] {
        let phrases = [&*value.to_string(), "7 was signalled before"];
        refused(timeline.signal(value, stream), "a value that has not grown", "InvalidInput", &phrases)?;
        refused(timeline.signal_now(value), "the same on the host", "InvalidInput", &phrases)?;
    }
    for value in [Timeline::END, Timeline::END + 1, u64::MAX] {
        let (kind, phrases) = ("InvalidInput", [&*value.to_string(), "2^62"]);
        refused(timeline.signal(value, stream), "signalling a value beyond the end", kind, &phrases)?;
        refused(timeline.signal_now(value), "the same on the host", kind, &phrases)?;
        refused(timeline.wait(value, stream), "waiting for a value beyond the end", kind, &phrases)?;
        refused(timeline.wait_now(value, SHORT), "the same on the host", kind, &phrases)?;
    }
    equal(timeline.last_signalled(), 7, "the last value after all these were refused")?;
    timeline.signal(8, stream)?;
    timeline.signal(Timeline::END - 1, stream)?;
    pair.importer.must(&wait(Timeline::END - 1, 0))?;
    pair.importer.synchronize(0)?;
    equal(pair.value_at_importer()?, Timeline::END - 1, "the largest value, as the importer sees it")?;
    // It is a value like others, and does not close the timeline.
    Ok(pair.timeline.check()?)
}

/// Mappings of the same lease have one timeline, which lives until the last of them has gone.
pub fn second_mapping_has_the_same(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &float_bytes(&[OLD; COUNT]))?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let (first, second) = (ipc.open(&descriptor).on(&stream)?, ipc.open(&descriptor).on(&stream)?);
    let (one, other) = (first.timeline()?, second.timeline()?);
    exporter.must(&Command::Timelines { name: "t".into(), count: 1, of: Some("e".into()), timeout: PATIENCE })?;
    one.signal(3, &stream)?;
    exporter.must(&wait_now(3))?;
    equal(other.last_signalled(), 3, "what the other mapping's timeline has signalled")?;
    refused(other.signal(3, &stream), "the same value by the other one", "InvalidInput", &["3"])?;
    first.release(&stream)?;
    stream.synchronize()?;
    other.signal(4, &stream)?;
    exporter.must(&wait_now(4))?;
    exporter.must(&signal(1, 0))?;
    one.wait(1, &stream)?;
    stream_resumes(&stream, "the exporter has signalled")?;
    one.check()?;
    drop(second);
    happens_soon("the end with the last mapping", || Ok(one.check().is_err()))
}

/// If streams cannot wait on counters, a timeline is refused, and the error says what to do instead.
pub fn refused_where_there_are_none(context: &Context) -> Outcome {
    if context.backend().capabilities(DeviceOrdinal::new(0))?.timelines {
        return skip("the device has timelines");
    }
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let mapping = memory.ipc.open(share.descriptor()).on(&memory.stream)?;
    let phrases = [context.backend().info().name, "events"];
    refused(mapping.timeline(), "a timeline where there are none", "Unsupported", &phrases)?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    let asked = importer.request(&Command::Timeline { name: "t".into(), of: Some("m".into()) })?;
    refused(asked.result, "the same in another process", "Unsupported", &phrases)?;
    refused(share.timelines(1, SHORT).map(drop), "waiting for one", "Timeout", &["0 importers"])?;
    same(&importer.floats("m")?, &[OLD; COUNT], "the floats of a mapping whose timeline was refused")
}
