//! A hand-over through a ring and its acknowledgement: by hosts that spin, and by streams.

#![allow(unsafe_code, reason = "bare writes and waits on words that stay mapped until the process ends")]

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Result;
use device_ipc::{AsStream, DeviceOrdinal, Ring, Stream};

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target, Unit};
use crate::peer::message::{Command, Hand, Words};
use crate::peer::{BACK, Page, Remote, THERE};
use crate::wait::{TIMEOUT, settle};

pub(super) const ROW: Row =
    Row { name: "ring", title: "a hand-over through a ring and its acknowledgement", run };

/// Of hosts.
const ROUNDS: u64 = 1000;

/// Of streams: fewer than their queues hold, so that nobody waits to submit.
const STREAM_ROUNDS: u64 = 32;

const BYTES: u64 = 64 * 1024;

struct State {
    remote: Remote,
    /// One slot, so that each publication waits for the release before.
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
    state.remote.order(&Command::JoinRing { descriptor: state.ring.descriptor().to_string() })?;
    state.ring.wait_readers(1, TIMEOUT)?;
    let by_hosts = Subject {
        case: "a spinning receiver".into(),
        against: "two words in a shared page, spun on".into(),
        unit: Unit::Nanoseconds,
        target: Target::Most { value: 1500.0 },
        needs_hardware: false,
        note: Some("there and back; needs two free processors"),
    };
    let mut lines = vec![bench.compare(by_hosts, &mut state, ours_by_hosts, raw_by_hosts)?];
    lines.push(by_streams(bench, &mut state)?);
    state.remote.order(&Command::LeaveRing)?;
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
    // SAFETY: the page stays mapped until the process ends.
    let base = unsafe { bench.raw.register(state.page.address(), state.page.bytes(), bench.device) }?;
    let subject = Subject {
        case: CASE.into(),
        against: format!("write and wait on words in host memory, by {}", bench.raw.name()),
        unit: Unit::Nanoseconds,
        target: Target::None,
        needs_hardware: true,
        note: Some("there and back; no host waits; ours writes one word more, for the writer's own streams"),
    };
    bench.compare(subject, state, ours_by_streams, |state| raw_by_streams(bench, state, base))
}

fn ours_by_hosts(state: &mut State) -> Result<f64> {
    state.remote.tell(&Command::RingRounds { rounds: ROUNDS + 1, by: Hand::Host })?;
    hand_over(state)?;
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        hand_over(state)?;
    }
    let took = begin.elapsed();
    state.remote.done()?;
    Ok(took.as_nanos() as f64 / ROUNDS as f64)
}

/// Published, and released again.
fn hand_over(state: &mut State) -> Result<()> {
    state.ring.write(&state.stream)?.publish_now()?;
    Ok(state.ring.wait_writable(TIMEOUT)?)
}

fn raw_by_hosts(state: &mut State) -> Result<Option<f64>> {
    let first = state.next;
    state.next += ROUNDS + 1;
    let page = state.page.path();
    state.remote.tell(&Command::SpinRounds { page, first, rounds: ROUNDS + 1 })?;
    there_and_back(&state.page, first);
    let begin = Instant::now();
    for value in first + 1..state.next {
        there_and_back(&state.page, value);
    }
    let took = begin.elapsed();
    state.remote.done()?;
    Ok(Some(took.as_nanos() as f64 / ROUNDS as f64))
}

fn there_and_back(page: &Page, value: u64) {
    page.word(THERE).store(value, Ordering::Release);
    while page.word(BACK).load(Ordering::Acquire) < value {
        std::hint::spin_loop();
    }
}

fn ours_by_streams(state: &mut State) -> Result<f64> {
    state.remote.order(&Command::RingRounds { rounds: STREAM_ROUNDS, by: Hand::Stream })?;
    let begin = Instant::now();
    for _ in 0..STREAM_ROUNDS {
        state.ring.write(&state.stream)?.publish(&state.stream)?;
    }
    finished(state, begin)
}

fn raw_by_streams(bench: &Bench, state: &mut State, base: u64) -> Result<Option<f64>> {
    let first = state.next;
    state.next += STREAM_ROUNDS;
    let page = state.page.path();
    state.remote.order(&Command::RawRounds { page, on: Words::Host, first, rounds: STREAM_ROUNDS })?;
    let begin = Instant::now();
    for value in first..state.next {
        // SAFETY: the page stays registered until both streams have been waited for.
        unsafe {
            bench.raw.write_value(state.stream.as_stream(), base + THERE, value)?;
            bench.raw.wait_value(state.stream.as_stream(), base + BACK, value)?;
        }
    }
    finished(state, begin).map(Some)
}

/// Nanoseconds of a round, once both streams are through.
fn finished(state: &mut State, begin: Instant) -> Result<f64> {
    state.stream.synchronize()?;
    state.remote.order(&Command::Synchronize)?;
    Ok(begin.elapsed().as_nanos() as f64 / STREAM_ROUNDS as f64)
}
