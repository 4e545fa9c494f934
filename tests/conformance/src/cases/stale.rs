//! Descriptors that outlived what they name. The bare drivers would hand out somebody else's memory; here each gets an
//! error that says what happened.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use device_ipc_core::backend::Lifetime;
use device_ipc_core::Error;

use crate::agent::{Command, Opening, Place, Sharing};
use crate::check::{Refusal, refused, refused_as_one_of, same, that};
use crate::flows::{Memory, SOON, bytes_of, pattern};
use crate::{Context, Outcome, Stop, fail};

/// An export that was dropped before its first open cannot be opened.
pub fn dropped_before_the_first_open(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share()?;
    let descriptor = share.descriptor().clone();
    drop(share);
    let mut importer = context.agent()?;
    let phrases = [&*format!("process {}", std::process::id()), "dropped", "new descriptor"];
    let result = importer.try_open("m", Opening::new(&descriptor, Place::Home))?;
    refused(result, "opening a dropped export", "ExportDropped", &phrases)?;
    refused(memory.ipc.open(&descriptor).at_home(), "the same in its own process", "ExportDropped", &phrases)
}

/// From the moment of the drop new opens fail, also in an importer that holds the export or kept it: what the exporter
/// says after the drop by any other road must not overtake the library's own notice.
pub fn dropped_from_that_moment_on(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let mut importer = context.agent()?;
    for round in 0..200 {
        let share = memory.share()?;
        let descriptor = share.descriptor().clone();
        importer.open("m", &descriptor, Place::Home)?;
        if round % 2 == 0 {
            importer.drop_mapping("m")?;
        }
        drop(share);
        let result = importer.try_open("again", Opening::new(&descriptor, Place::Home))?;
        let what = format!("opening at once what the exporter has just dropped (round {round})");
        refused(result, &what, "ExportDropped", &["dropped"])?;
    }
    Ok(())
}

/// The exporter has exited normally.
pub fn exporter_exited(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(4096))?;
    let id = exporter.peer().id();
    exporter.exit()?;
    is_gone(context.ipc().open(&descriptor).at_home(), id)
}

/// The exporter was killed.
pub fn exporter_killed(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(4096))?;
    let id = exporter.peer().id();
    exporter.kill()?;
    is_gone(context.ipc().open(&descriptor).at_home(), id)
}

/// The exporter was killed and its parent has not asked for its status yet: its process id still stands in `/proc`.
pub fn exporter_killed_and_not_reaped(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(4096))?;
    let other = exporter.export("other", &pattern(64))?;
    let mapping = context.ipc().open(&descriptor).at_home()?;
    let gone = told_of_the_end(&mapping);
    let id = exporter.peer().id();
    exporter.peer().kill()?;
    gone.recv_timeout(SOON).map_err(|_| Stop::failed("on_gone was not called when the exporter was killed"))?;
    is_gone(context.ipc().open(&other).at_home(), id)?;
    is_gone(context.ipc().open(&descriptor).at_home(), id)
}

/// An importer that has memory of a killed exporter open is notified, once; later requests to that exporter fail.
pub fn exporter_killed_while_open(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(4096))?;
    let unopened = exporter.export("unopened", &pattern(4096))?;
    let mapping = context.ipc().open(&descriptor).at_home()?;
    let gone = told_of_the_end(&mapping);
    let id = exporter.peer().id();
    exporter.kill()?;
    let told = gone.recv_timeout(SOON).map_err(|_| Stop::failed("on_gone was not called when the exporter was killed"))?;
    refused(Err::<(), _>(told), "what on_gone is told", "ExporterGone", &[&id.to_string(), "has terminated"])?;
    let late = told_of_the_end(&mapping);
    that(late.recv_timeout(SOON).is_ok(), "on_gone of an exporter that has ended should be called at once")?;
    that(gone.try_recv().is_err(), "on_gone should be called once")?;
    is_gone(context.ipc().open(&unopened).at_home(), id)?;
    is_gone(context.ipc().open(&descriptor).at_home(), id)
}

/// What a mapping is worth when the exporter has been killed is what the kind of handle says: importers pin the memory
/// and read on, or it is revoked and reading is an error.
pub fn mapping_of_a_killed_exporter(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &bytes)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&descriptor).on(&stream)?;
    let gone = told_of_the_end(&mapping);
    exporter.kill()?;
    gone.recv_timeout(SOON).map_err(|_| Stop::failed("on_gone was not called when the exporter was killed"))?;
    let lifetime = context.backend().handle_kinds().first().map(|kind| kind.lifetime);
    let read = bytes_of(&mapping, &stream);
    match (lifetime, read) {
        (Some(Lifetime::Pins), read) => same(&read?, &bytes, "the bytes that importers pin"),
        (Some(Lifetime::Revokes), Err(_)) => Ok(()),
        (Some(Lifetime::Revokes), Ok(_)) => fail("the kind of handle revokes, and memory of a dead exporter was read"),
        (None, _) => fail("the backend has no kind of handle"),
    }
}

/// A mapping that was dropped receives no notification.
pub fn no_notice_after_the_mappings_end(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(4096))?;
    let other = exporter.export("other", &pattern(64))?;
    let ipc = context.ipc();
    let (ended, open) = (ipc.open(&descriptor).at_home()?, ipc.open(&other).at_home()?);
    let (unwanted, wanted) = (told_of_the_end(&ended), told_of_the_end(&open));
    drop(ended);
    exporter.kill()?;
    that(wanted.recv_timeout(SOON).is_ok(), "on_gone was not called when the exporter was killed")?;
    that(unwanted.try_recv().is_err(), "on_gone of a mapping that had ended should not be called")
}

/// The memory was freed and another allocation stands in its place: its export is another one, and the old descriptor
/// does not open it.
pub fn memory_given_to_somebody_else(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let old = exporter.export("e", &[1; 4096])?;
    let mapping = context.ipc().open(&old).at_home()?;
    drop(mapping);
    exporter.must(&Command::WaitReleased { name: "e".into(), timeout: SOON })?;
    exporter.must(&Command::Drop { names: vec!["e".into()] })?;
    // Frees the old buffer, and in most allocators gets its place.
    exporter.allocate("e", 0, &[2; 4096])?;
    let new = exporter.share("e", Sharing::default())?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let fresh = ipc.open(&new).on(&stream)?;
    same(&bytes_of(&fresh, &stream)?, &[2; 4096], "the bytes of the new export")?;
    refused(ipc.open(&old).on(&stream), "opening by the old descriptor", "ExportDropped", &["dropped"])
}

/// An exporter that does not answer delays no importer of another one.
pub fn exporter_that_does_not_answer_delays_no_other(context: &Context) -> Outcome {
    let (mut stopped, mut other) = (context.agent()?, context.agent()?);
    let unanswered = stopped.export("e", &pattern(64))?;
    let answered = other.export("e", &pattern(64))?;
    stopped.peer().stop()?;
    let patience = SOON;
    let ipc = context.ipc();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ipc.open(&unanswered).timeout(patience).at_home().map(drop));
        let mut rounds = 0;
        while !waiting.is_finished() && rounds < 50 {
            let begun = Instant::now();
            drop(ipc.open(&answered).at_home()?);
            let took = begun.elapsed();
            that(took < patience / 2, format!("an open took {took:?} beside one of a stopped exporter"))?;
            rounds += 1;
        }
        // There is nothing more to wait for.
        stopped.kill()?;
        let waited = waiting.join().map_err(|_| Stop::failed("the waiting thread panicked"))?;
        refused_as_one_of(waited, "opening memory of a stopped process", &["ExporterGone", "Timeout"], &[])
    })
}

/// As soon as any process can know that an exporter was killed, no memory of it is opened, also not memory that is open here: the
/// importer must notice the death no later than the exporter's parent.
///
/// Twenty rounds; fewer, and at least five, where processes start so slowly that the case would exceed its deadline.
pub fn exporter_killed_from_that_moment_on(context: &Context) -> Outcome {
    let ipc = context.ipc();
    let begun = Instant::now();
    for round in 0..20 {
        if round >= 5 && begun.elapsed() > Duration::from_secs(25) {
            break;
        }
        let mut exporter = context.agent()?;
        let descriptor = exporter.export("e", &pattern(64))?;
        let id = exporter.peer().id();
        let mapping = ipc.open(&descriptor).at_home()?;
        drop(ipc.open(&descriptor).at_home()?);
        exporter.kill()?;
        is_gone(ipc.open(&descriptor).at_home(), id)?;
        drop(mapping);
    }
    Ok(())
}

fn is_gone<T>(result: Result<T, Error>, id: u32) -> Outcome {
    let phrases = [&*id.to_string(), "has terminated"];
    refused_as_one_of(result, "opening memory of a process that has ended", &["ExporterGone"], &phrases)
}

fn told_of_the_end(mapping: &device_ipc_core::Mapping) -> std::sync::mpsc::Receiver<Refusal> {
    let (sender, receiver) = channel();
    mapping.on_gone(move |why| {
        // The case may be over.
        let _ = sender.send(Refusal::from(why));
    });
    receiver
}
