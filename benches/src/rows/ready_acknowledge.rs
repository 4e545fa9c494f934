//! Ready and acknowledge between the streams of two processes, without either host.
//!
//! The words of a timeline are in host memory that is registered with both devices, because a plain store can then release
//! a stream that waits for a terminated peer. Those of the raw calls are too.

use std::time::Instant;

use anyhow::Result;

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target};
use crate::peer::Remote;
use crate::peer::message::Command;
use crate::rows::raw_words::RawWords;
use crate::wait::settle;

pub(super) const ROW: Row =
    Row { name: "ready-acknowledge", title: "ready and acknowledge between two streams", run };

/// Fewer than the queue of a stream holds, so that no submission blocks.
const ROUNDS: u64 = 100;

const BYTES: u64 = 64 * 1024;

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let ours = bench.ipc.backend().capabilities(device_ipc::DeviceOrdinal::new(bench.device))?;
    if !ours.timelines {
        return Ok(vec![bench.skipped("", "the device has no timelines")]);
    }
    let peer_device = if bench.has_peer_device()? { bench.other } else { bench.device };
    let place = if peer_device == bench.device { "one device" } else { "two devices" };
    let mut remote = bench.remote(peer_device)?;
    let descriptors = remote.share(1, BYTES, 1)?;
    let mapping = bench.ipc.open(&descriptors[0]).on_device(bench.device)?;
    let (stream, timeline) = (bench.ipc.create_stream(bench.device)?, mapping.timeline()?);
    let (mut words, mut next) = (RawWords::new(bench)?, 1);
    let against = format!("write and wait on words in host memory, by {}", bench.raw.name());
    let subject = Subject::new(place, against)
        .target(Target::times(1.1))
        .needs_hardware(true)
        .note("a whole round: ready and acknowledge");
    let round_time = |remote: &mut Remote, begin: Instant| {
        stream.synchronize()?;
        let took = begin.elapsed();
        remote.execute(&Command::Synchronize)?;
        Ok(took.as_nanos() as f64 / ROUNDS as f64)
    };
    let ours = |remote: &mut Remote| {
        let first = next;
        next += ROUNDS;
        remote.execute(&Command::TimelineRounds { first, rounds: ROUNDS })?;
        let begin = Instant::now();
        for value in first..next {
            timeline.signal(value, &stream)?;
            timeline.wait(value, &stream)?;
        }
        round_time(remote, begin)
    };
    let raw = |remote: &mut Remote| {
        let begin = words.submit(bench, remote, &stream, ROUNDS)?;
        round_time(remote, begin).map(Some)
    };
    let line = bench.compare(subject, &mut remote, ours, raw)?;
    drop(timeline);
    mapping.release(&stream).map_err(device_ipc::Error::from)?;
    settle()?;
    remote.finish()?;
    Ok(vec![line])
}
