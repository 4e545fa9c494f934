//! The hand-over through a ring and its acknowledgement: by spinning hosts, and by streams.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Result;
use device_ipc::{DeviceOrdinal, Ring, Stream};

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target};
use crate::peer::message::{Command, RingUser};
use crate::peer::{Page, REQUEST, RESPONSE, Remote};
use crate::rows::raw_words::RawWords;
use crate::wait::{TIMEOUT, settle};

pub(super) const ROW: Row =
    Row { name: "ring", title: "a hand-over through a ring and its acknowledgement", run };

/// Number of rounds of hosts.
const ROUNDS: u64 = 1000;

/// Number of rounds of streams: fewer than their queues hold, so that no submission blocks.
const STREAM_ROUNDS: u64 = 32;

const BYTES: u64 = 64 * 1024;

struct State {
    remote: Remote,
    /// A ring of one slot, so that each publication waits for the release of the previous one.
    ring: Ring,
    stream: Stream,
    page: Page,
    next: u64,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut state = State {
        remote: bench.remote(bench.device)?,
        ring: bench.ipc.ring(bench.ipc.allocate(bench.device, BYTES)?).slots(1).start()?,
        stream: bench.ipc.create_stream(bench.device)?,
        page: Page::create()?,
        next: 1,
    };
    state.remote.execute(&Command::JoinRing { descriptor: state.ring.descriptor().clone() })?;
    state.ring.wait_readers(1, TIMEOUT)?;
    let by_hosts = Subject::new("a spinning receiver", "two words in a shared page, by spinning")
        .target(Target::Most { value: 1500.0 })
        .note("publication and release; requires two free processors");
    let mut lines = vec![bench.compare(by_hosts, &mut state, ours_by_hosts, raw_by_hosts)?];
    lines.push(by_streams(bench, &mut state)?);
    state.remote.execute(&Command::LeaveRing)?;
    state.ring.close(TIMEOUT)?;
    settle()?;
    state.remote.finish()?;
    Ok(lines)
}

fn by_streams(bench: &Bench, state: &mut State) -> Result<Line> {
    const CASE: &str = "streams of both processes";
    if !bench.ipc.backend().capabilities(DeviceOrdinal::new(bench.device))?.timelines {
        return Ok(bench.skipped(CASE, "the device has no timelines"));
    }
    let mut words = RawWords::new(bench)?;
    let subject = Subject::new(
        CASE,
        format!("write and wait on words in host memory, by {}", bench.raw.name()),
    )
    .needs_hardware(true)
    .note("publication and release; no host waits; our side writes one more word, for the writer's streams");
    bench.compare(subject, state, ours_by_streams, |state| raw_by_streams(bench, state, &mut words))
}

fn ours_by_hosts(state: &mut State) -> Result<f64> {
    state.remote.send(&Command::RingRounds { rounds: ROUNDS + 1, by: RingUser::Host })?;
    hand_over(state)?;
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        hand_over(state)?;
    }
    let took = begin.elapsed();
    state.remote.wait_done()?;
    Ok(took.as_nanos() as f64 / ROUNDS as f64)
}

/// Publishes a slot and waits until it is released.
fn hand_over(state: &mut State) -> Result<()> {
    state.ring.write(&state.stream)?.publish_now()?;
    Ok(state.ring.wait_writable(TIMEOUT)?)
}

fn raw_by_hosts(state: &mut State) -> Result<Option<f64>> {
    let first = state.next;
    state.next += ROUNDS + 1;
    let page = state.page.path();
    state.remote.send(&Command::SpinRounds { page, first, rounds: ROUNDS + 1 })?;
    raw_round_trip(&state.page, first);
    let begin = Instant::now();
    for value in first + 1..state.next {
        raw_round_trip(&state.page, value);
    }
    let took = begin.elapsed();
    state.remote.wait_done()?;
    Ok(Some(took.as_nanos() as f64 / ROUNDS as f64))
}

fn raw_round_trip(page: &Page, value: u64) {
    page.word(REQUEST).store(value, Ordering::Release);
    while page.word(RESPONSE).load(Ordering::Acquire) < value {
        std::hint::spin_loop();
    }
}

fn ours_by_streams(state: &mut State) -> Result<f64> {
    state.remote.execute(&Command::RingRounds { rounds: STREAM_ROUNDS, by: RingUser::Stream })?;
    let begin = Instant::now();
    for _ in 0..STREAM_ROUNDS {
        state.ring.write(&state.stream)?.publish()?;
    }
    round_time(state, begin)
}

fn raw_by_streams(bench: &Bench, state: &mut State, words: &mut RawWords) -> Result<Option<f64>> {
    let begin = words.submit(bench, &mut state.remote, &state.stream, STREAM_ROUNDS)?;
    round_time(state, begin).map(Some)
}

/// Synchronizes both streams and returns the time of a round in nanoseconds.
fn round_time(state: &mut State, begin: Instant) -> Result<f64> {
    state.stream.synchronize()?;
    state.remote.execute(&Command::Synchronize)?;
    Ok(begin.elapsed().as_nanos() as f64 / STREAM_ROUNDS as f64)
}
