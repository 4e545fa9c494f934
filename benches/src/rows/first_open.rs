//! The first open of an allocation: the round trip to the broker, and the remaining time beside the driver's open.

use anyhow::Result;
use device_ipc::Descriptor;
use device_ipc::limits::CacheLimits;

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::peer::message::Command;
use crate::peer::request;
use crate::wait::settle;

pub(super) const ROW: Row = Row { name: "first-open", title: "first open of an allocation", run };

const BLOCKS: usize = 16;
const BYTES: u64 = 4 << 20;

/// Number of exports of one allocation for the measurement of the round trip.
const TRIPS: usize = 64;

/// Approximate sizes of a request for a lease and of its reply with a handle of 64 B.
const REQUEST_BYTES: usize = 32;
const GRANT_BYTES: usize = 112;

fn run(bench: &Bench) -> Result<Vec<Line>> {
    bench.raw.enter(bench.device)?;
    // Without a cache, a released mapping is closed, so that the next open is a first open.
    device_ipc::limits::set_cache_limits(CacheLimits::NONE)?;
    let mut lines = Vec::new();
    for (case, device) in [("same device", bench.device), ("from the other device", bench.other)] {
        if device != bench.device && !bench.has_peer_device()?
            || case != "same device" && device == bench.device
        {
            lines.push(bench.skipped(case, "requires two devices with peer access"));
            continue;
        }
        lines.extend(measure(bench, case, device)?);
    }
    device_ipc::limits::set_cache_limits(CacheLimits::default())?;
    Ok(lines)
}

fn measure(bench: &Bench, case: &str, home: u32) -> Result<Vec<Line>> {
    let mut exporter = bench.remote(home)?;
    let socket = exporter.socket(&Command::Echo { spins: false })?;
    let first = exporter.share(BLOCKS, BYTES, 1)?;
    // Exports of one allocation, which stays open.
    let trips = exporter.share(1, BYTES, TRIPS + 1)?;
    let open = bench.ipc.open(&trips[TRIPS]).on_device(bench.device)?;
    let handles = bench.raw_handles(&mut exporter, BLOCKS, BYTES)?;
    let request = request(REQUEST_BYTES, GRANT_BYTES);
    let round_trip = || socket.round_trip(&request, &mut [0; GRANT_BYTES]);

    let subject = Subject::new(format!("round trip to the broker, {case}"), "raw socket, the same bytes")
        .target(Target::times(1.5))
        .note(
            "ours: a lease on another export of an allocation that is open, so that no driver call is made",
        );
    let trip = bench.compare(
        subject,
        &mut (),
        |()| opened(bench, &trips[..TRIPS]),
        |()| timed(TRIPS, |_| round_trip()).map(Some),
    )?;

    let against = format!("open, by {}, after a round trip over a raw socket", bench.raw.name());
    let subject = Subject::new(format!("{} MiB, {case}, the round trip apart", BYTES >> 20), against)
        .target(Target::times(1.05))
        .needs_hardware(true)
        .note(
            "ours: the whole open minus the round trip of the same round; raw: the open only, on a thread that a packet has \
             just woken, as in the library",
        );
    let ours = |(): &mut ()| {
        let trip = opened(bench, &trips[..TRIPS])?;
        Ok(opened(bench, &first)? - trip)
    };
    let raw = |(): &mut ()| {
        let (mut mappings, mut took) = (Vec::with_capacity(BLOCKS), 0.0);
        for handle in &handles {
            round_trip()?;
            took += timed(1, |_| {
                mappings.push(bench.raw.open(handle, bench.device)?);
                Ok(())
            })?;
        }
        mappings.into_iter().try_for_each(|mapping| bench.raw.close(mapping))?;
        Ok(Some(took / BLOCKS as f64))
    };
    let first_open = bench.compare(subject, &mut (), ours, raw)?;
    drop(open);
    settle()?;
    drop(socket);
    exporter.finish()?;
    Ok(vec![trip, first_open])
}

fn opened(bench: &Bench, descriptors: &[Descriptor]) -> Result<f64> {
    let mut mappings = Vec::with_capacity(descriptors.len());
    let took = timed(descriptors.len(), |index| {
        mappings.push(bench.ipc.open(&descriptors[index]).on_device(bench.device)?);
        Ok(())
    })?;
    drop(mappings);
    settle()?;
    Ok(took)
}
