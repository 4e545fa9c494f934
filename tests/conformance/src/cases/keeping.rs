//! Idle leases: the next open costs nothing; and how they are returned.

use std::time::{Duration, Instant};

use device_ipc_core::backend::Lifetime;
use device_ipc_core::limits::{CacheLimits, set_cache_limits};
use device_ipc_core::{HolderPolicy, close_unused, counters};

use crate::agent::{Command, Place, Sharing};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, bytes_of, pattern, until};
use crate::{Context, Outcome, Stop, fail, skip};

const SHORT: Duration = Duration::from_millis(50);

/// Opening the same export again costs neither a message nor a driver call, whether it is open or idle.
pub fn opening_again_costs_nothing(context: &Context) -> Outcome {
    let bytes = pattern(5000);
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &bytes)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    for round in 0..10 {
        let outer = ipc.open(&descriptor).on(&stream)?;
        let inner = ipc.open(&descriptor).on(&stream)?;
        drop(outer);
        same(&bytes_of(&inner, &stream)?, &bytes, format!("the bytes in round {round}"))?;
    }
    let seen = counters();
    let found = (seen.opens_total, seen.requests_total, seen.driver_opens_total, seen.driver_closes_total);
    equal(found, (20, 1, 1, 0), "opens, requests to the exporter, driver's opens and closes")
}

/// Another export of an allocation that is open costs a message and no driver call.
pub fn another_region_costs_no_driver_call(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let mut exporter = context.agent()?;
    exporter.allocate("e", 0, &bytes)?;
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mut open = Vec::new();
    for index in 0..8_u64 {
        let sharing = Sharing { offset: index * 512, len: Some(512), ..Default::default() };
        let descriptor = exporter.share_as(&index.to_string(), "e", sharing)?;
        open.push(ipc.open(&descriptor).on(&stream)?);
    }
    for (mapping, part) in open.iter().zip(bytes.chunks(512)) {
        same(&bytes_of(mapping, &stream)?, part, "the bytes of a region")?;
    }
    let seen = counters();
    equal((seen.requests_total, seen.driver_opens_total), (8, 1), "requests to the exporter, and driver's opens")
}

/// Opening memory of one's own process costs no driver call and no message.
pub fn own_process_costs_no_driver_call(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    let mapping = memory.ipc.open(share.descriptor()).at_home()?;
    same(&bytes_of(&mapping, &memory.stream)?, &pattern(64), "the bytes")?;
    let seen = counters();
    equal((seen.requests_total, seen.driver_opens_total), (0, 0), "requests to an exporter, and driver's opens")
}

/// Idle leases are returned when the exporter waits for them, and when it drops the export.
pub fn unused_goes_back_on_demand(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let (waited, dropped) = (exporter.export("waited", &pattern(64))?, exporter.export("dropped", &pattern(64))?);
    let ipc = context.ipc();
    drop((ipc.open(&waited).at_home()?, ipc.open(&dropped).at_home()?));
    exporter.must(&Command::WaitReleased { name: "waited".into(), timeout: SOON })?;
    until("the close of what the exporter waits for", |seen| seen.driver_closes_total >= 1)?;
    exporter.must(&Command::Drop { names: vec!["dropped".into()] })?;
    until("the close of what the exporter dropped", |seen| seen.driver_closes_total == 2)?;
    equal(counters().mapped_bytes, 0, "the bytes that are still mapped")
}

/// Idle leases are returned when the importer closes them; used leases stay.
pub fn close_unused_gives_back(context: &Context) -> Outcome {
    let bytes = pattern(4096);
    let mut exporter = context.agent()?;
    let (used, unused) = (exporter.export("used", &bytes)?, exporter.export("unused", &bytes)?);
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let mapping = ipc.open(&used).on(&stream)?;
    ipc.open(&unused).on(&stream)?.release(&stream)?;
    stream.synchronize()?;
    until("the close of what is unused", |_| close_unused(SOON).is_ok() && counters().driver_closes_total == 1)?;
    same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes of the mapping that is used")
}

/// Where nothing is to be kept, the last drop closes.
pub fn limits_of_nothing_keep_nothing(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    set_cache_limits(CacheLimits::NONE)?;
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(64))?;
    for closes in 1..=3 {
        drop(memory.ipc.open(&descriptor).at_home()?);
        until("the close after the last drop", |seen| seen.driver_closes_total == closes)?;
    }
    equal(counters().driver_opens_total, 3, "the driver's opens")
}

/// The driver pins a dead exporter's memory while it is open anywhere: idle mappings are closed when the exporter dies.
pub fn exporters_death_closes_the_unused(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    let descriptor = exporter.export("e", &pattern(64))?;
    drop(context.ipc().open(&descriptor).at_home()?);
    exporter.kill()?;
    until("the close of an unused mapping of a dead exporter", |seen| seen.mapped_bytes == 0)
}

/// Freeing under a holder is the caller's stated choice, where the kind of handle revokes; else it is refused at once.
pub fn freeing_under_a_holder(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    let mut importer = context.agent()?;
    importer.open("m", share.descriptor(), Place::Home)?;
    let id = importer.peer().id().to_string();
    match context.backend().handle_kinds().first().map(|kind| kind.lifetime) {
        Some(Lifetime::Pins) => {
            let begun = Instant::now();
            let closed = share.close_with(SOON, HolderPolicy::FreeAnyway);
            refused(closed, "freeing what importers pin", "Unsupported", &["pin"])?;
            that(begun.elapsed() < SOON, "that refusal should come at once")?;
            same(&importer.bytes("m")?, &pattern(64), "the bytes that the importer reads after the refusal")
        }
        Some(Lifetime::Revokes) => {
            let closed = share.close_with(SHORT, HolderPolicy::FreeAnyway);
            refused(closed, "freeing under a holder", "StillHeld", &[&id])?;
            let freed = Instant::now() + SOON;
            while counters().exports > 0 {
                that(Instant::now() < freed, "the memory should be freed under its holder")?;
                std::thread::yield_now();
            }
            let read = importer.request(&Command::Bytes { name: "m".into() })?;
            that(read.result.is_err(), "reading revoked memory should be an error")
        }
        None => fail("the backend has no kind of handle"),
    }
}

/// Two threads open and drop at random what two exporters share, with little room to keep it, and nothing is mapped
/// twice, closed under a reader, or left over.
pub fn many_threads_with_little_room(context: &Context) -> Outcome {
    const EXPORTS: usize = 6;
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return skip("needs two processors");
    }
    set_cache_limits(CacheLimits::default().with_mappings(2))?;
    let (mut one, mut other) = (context.agent()?, context.agent()?);
    let mut descriptors = Vec::new();
    for index in 0..EXPORTS {
        let agent = if index % 2 == 0 { &mut one } else { &mut other };
        descriptors.push(agent.export(&index.to_string(), &[index as u8; 64])?);
    }
    let ipc = context.ipc();
    let work = |seed: usize| -> Outcome {
        let stream = ipc.create_stream(0)?;
        for round in 0..100 {
            let index = (seed + round * (2 * seed + 1)) % EXPORTS;
            let mapping = ipc.open(&descriptors[index]).on(&stream)?;
            same(&bytes_of(&mapping, &stream)?, &[index as u8; 64], format!("the bytes of export {index}"))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|seed| scope.spawn({ let work = &work; move || work(seed) })).collect();
        for thread in threads {
            thread.join().map_err(|_| Stop::failed("a thread panicked"))??;
        }
        Ok::<_, Stop>(())
    })?;
    set_cache_limits(CacheLimits::NONE)?;
    until("the close of everything", |seen| {
        seen.mapped_bytes == 0 && seen.driver_opens_total == seen.driver_closes_total
    })
}
