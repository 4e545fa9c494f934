//! Idle leases: how they are returned, and memory that is freed under a holder.

use std::time::{Duration, Instant};

use device_ipc_core::backend::Lifetime;
use device_ipc_core::limits::{CacheLimits, set_cache_limits};
use device_ipc_core::{HolderPolicy, counters};

use crate::agent::{Command, Place};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, bytes_of, pattern, until};
use crate::{Context, Outcome, Stop, fail, skip};

const SHORT: Duration = Duration::from_millis(50);

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
