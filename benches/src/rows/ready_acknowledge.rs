//! Ready and acknowledge between the streams of two processes, without either host.
//!
//! The words of a timeline are in host memory that is registered with both devices, because a plain store can then release
//! a stream that waits for a terminated peer. Those of the raw calls are too.

#![allow(unsafe_code, reason = "raw writes and waits on words that stay mapped until the process exits")]

use anyhow::Result;
use device_ipc::{AsStream, Mapping, Stream, Timeline};

use std::path::PathBuf;
use std::time::Instant;

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target};
use crate::peer::message::Command;
use crate::peer::{Page, REQUEST, RESPONSE, Remote};

pub(super) const ROW: Row =
    Row { name: "ready-acknowledge", title: "ready and acknowledge between two streams", run };

/// Fewer than the queue of a stream holds, so that no submission blocks.
const ROUNDS: u64 = 100;

const BYTES: u64 = 64 * 1024;

struct State {
    remote: Remote,
    stream: Stream,
    timeline: Timeline,
    next: u64,
    page: PathBuf,
    /// Device address of the raw words.
    base: u64,
    raw_next: u64,
}

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
    let page = Page::create()?;
    // SAFETY: the page stays mapped until the process exits.
    let base = unsafe { bench.raw.register(page.address(), page.bytes(), bench.device) }?;
    let mut state = State {
        stream: bench.ipc.create_stream(bench.device)?,
        timeline: mapping.timeline()?,
        next: 1,
        page: page.path(),
        base,
        raw_next: 1,
        remote,
    };
    let against = format!("write and wait on words in host memory, by {}", bench.raw.name());
    let subject = Subject::new(place, against)
        .target(Target::times(1.1))
        .needs_hardware(true)
        .note("a whole round: ready and acknowledge");
    let line = bench.compare(subject, &mut state, ours_rounds, |state| raw_rounds(bench, state))?;
    finish(state, mapping)?;
    Ok(vec![line])
}

fn finish(state: State, mapping: Mapping) -> Result<()> {
    let State { remote, stream, timeline, .. } = state;
    drop(timeline);
    mapping.release(&stream).map_err(device_ipc::Error::from)?;
    crate::wait::settle()?;
    remote.finish()
}

fn ours_rounds(state: &mut State) -> Result<f64> {
    let first = state.next;
    state.next += ROUNDS;
    state.remote.execute(&Command::TimelineRounds { first, rounds: ROUNDS })?;
    let begin = Instant::now();
    for value in first..first + ROUNDS {
        state.timeline.signal(value, &state.stream)?;
        state.timeline.wait(value, &state.stream)?;
    }
    round_time(state, begin)
}

fn raw_rounds(bench: &Bench, state: &mut State) -> Result<Option<f64>> {
    let first = state.raw_next;
    state.raw_next += ROUNDS;
    let page = state.page.clone();
    state.remote.execute(&Command::RawRounds { page, first, rounds: ROUNDS })?;
    let begin = Instant::now();
    for value in first..first + ROUNDS {
        // SAFETY: the page and the mapping exist until both streams are synchronized.
        unsafe {
            bench.raw.write_value(state.stream.as_stream(), state.base + REQUEST, value)?;
            bench.raw.wait_value(state.stream.as_stream(), state.base + RESPONSE, value)?;
        }
    }
    round_time(state, begin).map(Some)
}

/// Synchronizes the streams and returns the time of a round in nanoseconds.
fn round_time(state: &mut State, begin: Instant) -> Result<f64> {
    state.stream.synchronize()?;
    let took = begin.elapsed();
    state.remote.execute(&Command::Synchronize)?;
    Ok(took.as_nanos() as f64 / ROUNDS as f64)
}
