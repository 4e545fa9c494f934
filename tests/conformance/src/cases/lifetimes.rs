//! Leases: holders, their lifetimes, and the reports to the exporter.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use device_ipc_core::{DeviceOwner, Export};

use crate::agent::{Agent, Command, Gating, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, Witness, bytes_of, pattern};
use crate::{Context, Outcome, Stop, unchecked};

const SHORT: Duration = Duration::from_millis(50);

/// An export whose owner's drop can be waited for.
fn share_with_witness(memory: &Memory) -> Result<(Export, Receiver<()>), Stop> {
    let (witness, receiver) = Witness::of(memory);
    let region = memory.buffer.region();
    Ok((memory.ipc.share(unchecked::owned(witness, region)).start()?, receiver))
}

fn owner_lives(dropped: &Receiver<()>, when: &str) -> Outcome {
    that(dropped.try_recv().is_err(), format!("the owner of the memory was dropped {when}"))
}

/// A wait for the release names the holders: process, program and bytes.
pub fn still_held_names_the_holder(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share_part(96, 1000)?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    let program = std::env::args_os().next().unwrap_or_default();
    let program = std::path::Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let id = importer.peer().id();
    let holders = share.holders();
    equal(holders.iter().len(), 1, "the number of holders")?;
    for holder in holders.iter() {
        equal((holder.pid, holder.bytes), (id, 1000), "process id and bytes of the holder")?;
        equal(&holder.program, &program.chars().take(64).collect(), "the program of the holder")?;
    }
    let phrases = [&*format!("process {id}"), &program, "1000 bytes", "after 50 ms"];
    refused(share.wait_released(SHORT), "waiting while it is held", "StillHeld", &phrases)?;
    importer.drop_mapping("m")?;
    share.wait_released(SOON)?;
    equal(share.holders().iter().len(), 0, "the number of holders after the release")?;
    equal(share.holders().opened(), 1, "how often it was opened")
}

/// A wait for the release of an export that was never opened says so, and is not a release.
pub fn never_opened_says_so(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    refused(share.wait_released(SHORT), "waiting for a first open", "NotOpened", &["no process has opened the export"])?;
    refused(share.wait_opened(1, SHORT), "the same", "NotOpened", &["no process has opened the export"])?;
    let begun = Instant::now();
    share.close(SOON)?;
    that(begun.elapsed() < SOON, "closing an export without an importer should not wait")
}

/// A refused open is no open: the export still waits for its first one.
pub fn wait_begins_with_the_first_open(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    let mut importer = context.agent()?;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| share.wait_released(SOON));
        importer.open("m", share.descriptor(), Place::Home)?;
        that(!waiting.is_finished(), "the wait ended while the export was held")?;
        importer.drop_mapping("m")?;
        Ok(waiting.join().map_err(|_| Stop::failed("the waiting thread panicked"))??)
    })
}

/// Dropping the export closes no mapping, and the mapping keeps the owner.
pub fn live_mapping_keeps_the_owner(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let (share, dropped) = share_with_witness(&memory)?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    drop(share);
    same(&importer.bytes("m")?, &bytes, "the bytes after the export was dropped")?;
    owner_lives(&dropped, "while an importer had the memory open")?;
    importer.drop_mapping("m")?;
    dropped.recv_timeout(SOON).map_err(|_| Stop::failed("the owner was not dropped after the last release"))
}

/// The owner of an export without holders is dropped with the export, once.
pub fn owner_goes_with_an_unopened_export(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let (share, dropped) = share_with_witness(&memory)?;
    owner_lives(&dropped, "while its export lived")?;
    share.close(SOON)?;
    that(dropped.try_recv().is_ok(), "close returned before the owner was dropped")?;
    that(dropped.recv().is_err(), "the owner was dropped twice")
}

/// Closing waits for the holders, and for the drop of the owner.
pub fn close_waits_for_the_holders(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let (share, dropped) = share_with_witness(&memory)?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    std::thread::scope(|scope| {
        let closing = scope.spawn(move || share.close(SOON));
        owner_lives(&dropped, "while an importer had the memory open")?;
        importer.drop_mapping("m")?;
        closing.join().map_err(|_| Stop::failed("the closing thread panicked"))??;
        that(dropped.try_recv().is_ok(), "close returned before the owner was dropped")
    })
}

/// Closing times out and names the holder; the export is closed all the same, and its owner is dropped after the release.
pub fn close_names_who_does_not_let_go(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let (share, dropped) = share_with_witness(&memory)?;
    let descriptor = share.descriptor().clone();
    let mut importer = context.agent()?;
    importer.open("m", &descriptor, Place::Home)?;
    let phrases = [&*importer.peer().id().to_string(), "64 bytes"];
    refused(share.close(SHORT), "closing what is held", "StillHeld", &phrases)?;
    refused(memory.ipc.open(&descriptor).at_home(), "opening it after that", "ExportDropped", &["dropped"])?;
    owner_lives(&dropped, "by a close that gave up")?;
    importer.drop_mapping("m")?;
    dropped.recv_timeout(SOON).map_err(|_| Stop::failed("the owner was not dropped after the release"))
}

/// The death of an importer ends its lease; a wait for the release reports it once, and `holders` keeps it.
pub fn importer_killed(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let (share, dropped) = share_with_witness(&memory)?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    let id = importer.peer().id();
    importer.kill()?;
    let phrases = [&*format!("process {id}"), "died", "incomplete"];
    refused(share.wait_released(SOON), "waiting for an importer that was killed", "HolderDied", &phrases)?;
    share.wait_released(SOON)?;
    let died: Vec<_> = share.holders().died().map(|holder| holder.pid).collect();
    equal(died, vec![id], "the importers that died")?;
    share.close(SOON)?;
    that(dropped.try_recv().is_ok(), "the owner was not dropped after the killed importer")
}

/// An importer that exits in order while its stream has not reached the release of a mapping: its work is not lost.
pub fn exit_waits_for_released_work(context: &Context) -> Outcome {
    exits_with_work(context, |importer| importer.must(&Command::Release { name: "m".into(), device: None }).map(drop))
}

/// An importer that exits in order while a mapping is in use: the work that it has submitted is not lost.
pub fn exit_waits_for_work_in_use(context: &Context) -> Outcome {
    exits_with_work(context, |_| Ok(()))
}

/// An importer adds to every float behind a gate, and exits after `before_exit`.
fn exits_with_work(context: &Context, before_exit: impl FnOnce(&mut Agent) -> Outcome) -> Outcome {
    let floats = [1f32; 1024].map(f32::to_ne_bytes);
    let memory = Memory::with_bytes(context, 0, floats.as_flattened())?;
    let share = memory.share()?;
    let mut importer = context.agent()?;
    importer.prepare(0)?;
    importer.open("m", share.descriptor(), Place::Home)?;
    importer.must(&Command::CloseGate { device: 0, gate: Gating::Soon })?;
    importer.must(&Command::Add { name: "m".into(), value: 2.0 })?;
    before_exit(&mut importer)?;
    importer.exit()?;
    share.wait_released(SOON)?;
    let bytes = bytes_of(&memory.ipc.open(share.descriptor()).at_home()?, &memory.stream)?;
    same(&bytes, [3f32; 1024].map(f32::to_ne_bytes).as_flattened(), "the result of the importer that exited")
}

/// One importer's death ends its own lease and no other.
pub fn one_of_two_importers_killed(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let share = memory.share()?;
    let (mut one, mut other) = (context.agent()?, context.agent()?);
    one.open("m", share.descriptor(), Place::Home)?;
    other.open("m", share.descriptor(), Place::Home)?;
    let killed = one.peer().id();
    one.kill()?;
    let until = Instant::now() + SOON;
    while share.holders().iter().len() == 2 {
        that(Instant::now() < until, "the lease of a killed importer should end, and did not")?;
        std::thread::yield_now();
    }
    let left: Vec<u32> = share.holders().iter().map(|holder| holder.pid).collect();
    equal(left, vec![other.peer().id()], "the processes that still hold the export")?;
    same(&other.bytes("m")?, &bytes, "the bytes that the other importer reads")?;
    other.drop_mapping("m")?;
    let phrases = [&*format!("process {killed}"), "died"];
    refused(share.wait_released(SOON), "waiting for both importers", "HolderDied", &phrases)
}

/// The exporting process itself may have the memory open, and outlive its own export.
pub fn own_mapping_outlives_the_export(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let memory = Memory::with_bytes(context, 0, &bytes)?;
    let (share, dropped) = share_with_witness(&memory)?;
    let mapping = memory.ipc.open(share.descriptor()).at_home()?;
    drop(share);
    same(&bytes_of(&mapping, &memory.stream)?, &bytes, "the bytes after the export was dropped")?;
    owner_lives(&dropped, "while this process had the memory open")?;
    drop(mapping);
    dropped.recv_timeout(SOON).map_err(|_| Stop::failed("the owner was not dropped after the last mapping"))
}

/// An exporter can wait for its importers; importers that have released count too.
pub fn openings_are_waited_for(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    let (mut one, mut other) = (context.agent()?, context.agent()?);
    one.open("m", share.descriptor(), Place::Home)?;
    share.wait_opened(1, SOON)?;
    one.exit()?;
    share.wait_released(SOON)?;
    let phrases = ["opened 1 of 2 times", "50 ms"];
    refused(share.wait_opened(2, SHORT), "waiting for an importer that does not come", "NotOpened", &phrases)?;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| share.wait_opened(2, SOON));
        other.open("m", share.descriptor(), Place::Home)?;
        Ok(waiting.join().map_err(|_| Stop::failed("the waiting thread panicked"))??)
    })
}

/// An exporter is notified of each open, release and death, on a thread on which it may ask for the holders.
pub fn every_change_of_the_holders_is_told(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = std::sync::Arc::new(memory.share()?);
    let (tell, told) = std::sync::mpsc::channel();
    // Asks from within the call; `Weak`, as the export keeps the callback.
    let asked = std::sync::Arc::downgrade(&share);
    share.on_change(move || {
        let held = asked.upgrade().map(|share| share.holders().iter().len());
        let _ = tell.send(held);
    });
    let until = |count: usize, when: &str| {
        let deadline = Instant::now() + SOON;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match told.recv_timeout(left) {
                Ok(held) if held == Some(count) => return Ok(()),
                Ok(_) => {}
                Err(_) => return Err(Stop::failed(format!("no change to {count} holders was reported {when}"))),
            }
        }
    };
    let (mut one, mut other) = (context.agent()?, context.agent()?);
    one.open("m", share.descriptor(), Place::Home)?;
    until(1, "after an opening")?;
    other.open("m", share.descriptor(), Place::Home)?;
    until(2, "after a second opening")?;
    one.kill()?;
    until(1, "after a death")?;
    other.exit()?;
    until(0, "after the last release")?;
    drop(share);
    that(told.recv_timeout(SOON) == Err(std::sync::mpsc::RecvTimeoutError::Disconnected), "the callback stays behind")
}

/// A callback for changes that opens its own export does not cause its own next call.
pub fn callback_that_opens_its_own_export(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    let (calls, called) = std::sync::mpsc::channel();
    let (ipc, descriptor) = (memory.ipc.clone(), share.descriptor().clone());
    share.on_change(move || {
        // The case may be over.
        let _ = calls.send(ipc.open(&descriptor).at_home().map(drop));
    });
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    called.recv_timeout(SOON).map_err(|_| Stop::failed("the callback was not called for an open"))??;
    for _ in 0..50 {
        importer.must(&Command::Nothing)?;
    }
    let more = called.try_iter().count();
    that(more <= 2, format!("one open caused {more} further calls"))?;
    importer.drop_mapping("m")?;
    Ok(share.wait_released(SOON)?)
}
