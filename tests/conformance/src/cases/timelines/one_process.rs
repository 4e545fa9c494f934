//! Timelines whose two sides, or whose streams, are in one process.

use crate::check::{equal, refused, same};
use crate::flows::{Memory, OLD, happens_soon, stream_resumes};
use crate::gate::Gate;
use crate::{Context, Outcome, PATIENCE, unchecked};
use super::ends::has_ended;
use super::{BEGUN, COUNT, Pair, SHORT, only, signal, wait};

/// Streams of another backend are refused by name, and no value is used up.
pub fn stream_of_another_backend(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let mapping = memory.ipc.open(share.descriptor()).on(&memory.stream)?;
    let foreign = unchecked::stream_of_another_backend();
    for timeline in [mapping.timeline()?, only(share.timelines(1, SHORT)?)?] {
        let phrases = ["another-backend"];
        refused(timeline.signal(1, &foreign), "another backend's stream", "WrongBackend", &phrases)?;
        refused(timeline.wait(1, &foreign), "the same for waiting", "WrongBackend", &phrases)?;
        equal(timeline.last_signalled(), 0, "the last value after the refusal")?;
        timeline.signal(1, &memory.stream)?;
    }
    Ok(memory.stream.synchronize()?)
}

/// The counters are visible to every device: a stream of another device signals and waits, without peer access.
pub fn stream_of_another_device(context: &Context) -> Outcome {
    context.two_devices()?;
    context.needs_timelines(2)?;
    let mut pair = Pair::begin(context)?;
    let second = context.ipc().create_stream(1)?;
    // There and back: device 1, the importer's device 1, the importer's device 0, device 0.
    let gate = Gate::close(&second)?;
    pair.timeline.signal(2, &second)?;
    pair.importer.must(&wait(2, 1))?;
    pair.importer.must(&signal(2, 1))?;
    pair.timeline.wait(2, &second)?;
    pair.timeline.signal(3, &second)?;
    pair.importer.must(&wait(3, 0))?;
    pair.importer.must(&signal(3, 0))?;
    pair.timeline.wait(3, &pair.memory.stream)?;
    gate.open_soon();
    stream_resumes(&pair.memory.stream, "all have signalled")?;
    gate.was_passed("the last stream, for the first,")
}

/// In the exporting process the two sides are the same as between two processes.
pub fn in_one_process(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let memory = Memory::with_floats(context, COUNT)?;
    let share = memory.share()?;
    let reader = memory.ipc.create_stream(0)?;
    let mapping = memory.ipc.open(share.descriptor()).on(&reader)?;
    let near = mapping.timeline()?;
    let far = only(share.timelines(1, SHORT)?)?;
    equal((near.peer(), far.peer()), (std::process::id(), std::process::id()), "the processes of both ends")?;
    far.signal(BEGUN, &memory.stream)?;
    near.wait(BEGUN, &reader)?;
    reader.synchronize()?;
    let gate = Gate::close(&memory.stream)?;
    memory.add(1.0)?;
    far.signal(BEGUN + 1, &memory.stream)?;
    near.wait(BEGUN + 1, &reader)?;
    gate.open("signalling and waiting on streams")?;
    let read = mapping.view::<f32, _>(&reader)?.to_vec()?;
    same(&read, &[OLD + 1.0; COUNT], "the floats of one's own memory")?;
    near.signal_now(4)?;
    far.wait_now(4, PATIENCE)?;
    drop(mapping);
    happens_soon("the end of the lease", || Ok(far.check().is_err()))?;
    has_ended(&far, &memory.stream, 4, "LeaseEnded", std::process::id())?;
    has_ended(&near, &reader, BEGUN + 1, "LeaseEnded", std::process::id())
}
