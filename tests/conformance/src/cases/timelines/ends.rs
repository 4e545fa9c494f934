//! Timelines whose lease ends, by a release or by the death of either side.

use std::time::Duration;

use device_ipc_core::{Stream, Timeline};

use crate::agent::{Command, Place};
use crate::check::{Refusal, equal, refused, same};
use crate::flows::{Memory, OLD, SOON, float_bytes, happens_soon, stream_resumes};
use crate::{Context, Outcome, PATIENCE};
use super::{BEGUN, COUNT, Pair, SHORT, only, signal, wait};

/// A timeline that has ended refuses with this error, which names the process, all but waits for values that the peer had
/// signalled before.
#[track_caller]
pub(super) fn has_ended(
    timeline: &Timeline,
    stream: &Stream,
    reached: u64,
    kind: &str,
    pid: u32,
) -> Outcome {
    let (pid, next) = (pid.to_string(), timeline.last_signalled() + 1);
    let phrases = [&*pid];
    refused(timeline.check(), "checking a timeline that has ended", kind, &phrases)?;
    for value in [0, reached] {
        timeline.wait(value, stream)?;
        timeline.wait_now(value, Duration::ZERO)?;
    }
    refused(timeline.wait(reached + 1, stream), "a stream's wait on it", kind, &phrases)?;
    refused(timeline.signal(next, stream), "a stream's signal on it", kind, &phrases)?;
    refused(timeline.signal_now(next), "a signal on it", kind, &phrases)?;
    refused(timeline.wait_now(reached + 1, SHORT), "a wait on it", kind, &phrases)?;
    refused(timeline.value(), "its value", kind, &phrases)
}

/// The importer is killed while the exporter's stream waits for it: the stream resumes, and the exporter gets an error.
pub fn importer_killed_while_a_stream_waits(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let mut pair = Pair::begin(context)?;
    pair.timeline.wait(BEGUN + 1, &pair.memory.stream)?;
    pair.memory.add(1.0)?;
    pair.timeline.signal(BEGUN + 1, &pair.memory.stream)?;
    equal(pair.value_at_importer()?, BEGUN, "the value behind a wait")?;
    let Pair { memory, share, timeline, mut importer } = pair;
    let pid = importer.peer().id();
    importer.kill()?;
    stream_resumes(&memory.stream, "the importer has been killed")?;
    has_ended(&timeline, &memory.stream, BEGUN, "ImporterGone", pid)?;
    same(&memory.floats()?, &[OLD + 1.0; COUNT], "the floats behind the wait")?;
    happens_soon("an end that is no longer listed", || Ok(share.timelines(0, SHORT)?.is_empty()))?;
    Ok(share.close(SOON)?)
}

/// The exporter is killed while the importer's stream waits for it: the stream resumes, and the importer gets an error.
pub fn exporter_killed_while_a_stream_waits(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &float_bytes(&[OLD; COUNT]))?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    let timeline = mapping.timeline()?;
    exporter.must(&Command::Timelines { name: "t".into(), count: 1, of: Some("e".into()), timeout: PATIENCE })?;
    exporter.must(&signal(BEGUN, 0))?;
    timeline.wait(BEGUN, &stream)?;
    stream.synchronize()?;
    timeline.wait(BEGUN + 1, &stream)?;
    timeline.signal(1, &stream)?;
    let before: u64 = exporter.get(&Command::Value { name: "t".into() })?;
    equal(before, 0, "the value behind a wait, as the exporter sees it")?;
    let pid = exporter.peer().id();
    exporter.kill()?;
    stream_resumes(&stream, "the exporter has been killed")?;
    has_ended(&timeline, &stream, BEGUN, "ExporterGone", pid)
}

/// A signal still counts after the lease or its process has ended: a wait that begins then succeeds.
pub fn what_was_signalled_before_an_end_counts(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    for exits in [false, true] {
        let Pair { memory, share: _share, timeline, mut importer } = Pair::begin(context)?;
        let pid = importer.peer().id();
        importer.add("m", 1.0)?;
        importer.must(&signal(5, 0))?;
        let kind = if exits {
            importer.synchronize(0)?;
            importer.exit()?;
            "ImporterGone"
        } else {
            importer.must(&Command::Release { name: "m".into(), device: None })?;
            "LeaseEnded"
        };
        happens_soon("the end of the timeline", || Ok(timeline.check().is_err()))?;
        has_ended(&timeline, &memory.stream, 5, kind, pid)?;
        same(&memory.floats()?, &[OLD + 1.0; COUNT], "the floats behind the wait")?;
    }
    Ok(())
}

/// A release by the importer resumes the exporter's streams; the next mapping has a timeline that starts at 0.
pub fn ends_with_the_lease(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    for end in [Command::Drop { names: vec!["m".into()] }, Command::Release { name: "m".into(), device: None }] {
        let Pair { memory, share, timeline, mut importer } = Pair::begin(context)?;
        timeline.wait(BEGUN + 1, &memory.stream)?;
        importer.must(&end)?;
        stream_resumes(&memory.stream, "the importer has released its lease")?;
        has_ended(&timeline, &memory.stream, BEGUN, "LeaseEnded", importer.peer().id())?;
        happens_soon("the end of the importer's timeline", || {
            let checked = importer.request(&Command::Check { name: "t".into() })?.result;
            Ok(matches!(checked, Err(Refusal { kind, .. }) if kind == "LeaseEnded"))
        })?;
        importer.open("m", share.descriptor(), Place::Home)?;
        importer.must(&Command::Timeline { name: "t".into(), of: Some("m".into()) })?;
        let anew = only(share.timelines(1, PATIENCE)?)?;
        equal((anew.value()?, anew.last_signalled()), (0, 0), "the values of a new lease's timeline")?;
        importer.must(&signal(1, 0))?;
        anew.wait_now(1, PATIENCE)?;
        refused(timeline.check(), "the ended timeline, after a new one has begun", "LeaseEnded", &[])?;
    }
    Ok(())
}

/// Dropping the export closes no timeline: the lease continues, and its timeline with it.
pub fn goes_on_after_the_export_was_dropped(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let Pair { memory, share, timeline, mut importer } = Pair::begin(context)?;
    drop(share);
    memory.add(1.0)?;
    timeline.signal(BEGUN + 1, &memory.stream)?;
    importer.must(&wait(BEGUN + 1, 0))?;
    same(&importer.floats("m")?, &[OLD + 1.0; COUNT], "the floats after the export was dropped")?;
    importer.must(&signal(BEGUN + 1, 0))?;
    timeline.wait(BEGUN + 1, &memory.stream)?;
    stream_resumes(&memory.stream, "the importer has signalled")?;
    timeline.check()?;
    importer.drop_mapping("m")?;
    happens_soon("the end of the lease", || Ok(timeline.check().is_err()))?;
    has_ended(&timeline, &memory.stream, BEGUN + 1, "LeaseEnded", importer.peer().id())
}

/// In the exporting process too, a stream that waits for the mapping's side continues after the mapping was dropped or
/// released, behind the signals of the mapping's side.
pub fn in_one_process_an_exporter_that_waits_goes_on(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let reader = memory.ipc.create_stream(0)?;
    for (round, released) in [false, true].into_iter().enumerate() {
        let mapping = memory.ipc.open(share.descriptor()).on(&reader)?;
        let near = mapping.timeline()?;
        let far = only(share.timelines(1, SHORT)?)?;
        mapping.view_mut::<f32, _>(&reader)?.add(1.0)?;
        near.signal(1, &reader)?;
        far.wait(1, &memory.stream)?;
        let read = memory.floats()?;
        same(&read, &[OLD + 1.0 + round as f32; COUNT], "the floats that the mapping's side has signalled")?;
        far.wait(2, &memory.stream)?;
        let how = if released {
            mapping.release(&reader)?;
            "the mapping has been released"
        } else {
            drop(mapping);
            "the mapping has been dropped"
        };
        stream_resumes(&memory.stream, how)?;
        has_ended(&far, &memory.stream, 1, "LeaseEnded", std::process::id())?;
        happens_soon("an end that is no longer listed", || Ok(share.timelines(0, SHORT)?.is_empty()))?;
    }
    Ok(())
}
