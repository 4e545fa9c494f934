//! The hand-over of weights in buckets: one process copies them into a ring, and two readers on the same device copy every
//! bucket out.

use std::time::Instant;

use anyhow::Result;
use device_ipc::{Buffer, Ring, Stream};

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target, Unit};
use crate::peer::Remote;
use crate::peer::message::Command;
use crate::wait::{TIMEOUT, settle};

pub(super) const ROW: Row = Row {
    name: "weights",
    title: "weights in buckets through a ring, to two readers of the same device",
    run,
};

const READERS: usize = 2;

/// Alignment of buckets and slots: on an H200, copies with an alignment of only 256 B have 0.8 of the bandwidth.
const ALIGNMENT: u64 = 2 << 20;

struct State {
    readers: Vec<Remote>,
    ring: Ring,
    stream: Stream,
    /// The weights, in buckets.
    weights: Vec<Buffer>,
    /// The destinations of the raw copies.
    copies: Vec<Buffer>,
    /// Number of host waits of all processes, per round.
    host_waits: Vec<f64>,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let bucket = (bench.weights / bench.buckets as u64).next_multiple_of(ALIGNMENT);
    let mut state = State {
        readers: (0..READERS).map(|_| bench.remote(bench.device)).collect::<Result<_>>()?,
        ring: bench
            .ipc
            .ring(bench.ipc.allocate(bench.device, bucket * u64::from(bench.slots))?)
            .slots(bench.slots)
            .start()?,
        stream: bench.ipc.create_stream(bench.device)?,
        weights: buckets(bench, bucket)?,
        copies: buckets(bench, bucket)?,
        host_waits: Vec::new(),
    };
    for reader in &mut state.readers {
        reader.execute(&Command::JoinRing { descriptor: state.ring.descriptor().clone() })?;
    }
    state.ring.wait_readers(READERS, TIMEOUT)?;
    let case = format!("{} MiB in {} buckets, {} slots", bench.weights >> 20, bench.buckets, bench.slots);
    let subject = |case: String, against: &str| {
        Subject::new(case, against)
            .unit(Unit::BytesPerSecond)
            .target(Target::Speed { least: 0.95 })
            .needs_hardware(true)
            .note("bytes copied: ours into the ring once, and out of it by each of the two readers")
    };
    let alone = "the same copies from device to device, once, by one stream in one process";
    let alone = bench.compare(subject(case.clone(), alone), &mut state, ours, raw)?;
    let at_once = subject(
        format!("{case}, beside three processes"),
        "the same copies by each of three processes at once, unordered",
    );
    let at_once = bench.compare(at_once, &mut state, ours, |state| unordered(state).map(Some))?;
    let waits = Subject::new(format!("{case}, waits of a host for the ring, of all three processes"), "")
        .unit(Unit::Count)
        .target(Target::Most { value: 0.0 })
        .note(state.ring.waits_on_host().then_some("the device has no timelines, so hosts wait"));
    let steady = state.host_waits.split_off(state.host_waits.len().min(1));
    let waits = bench.figure(waits, &steady);
    finish(state)?;
    Ok(vec![alone, at_once, waits])
}

fn buckets(bench: &Bench, bytes: u64) -> Result<Vec<Buffer>> {
    (0..bench.buckets).map(|_| Ok(bench.ipc.allocate(bench.device, bytes)?)).collect()
}

fn finish(state: State) -> Result<()> {
    let State { readers, ring, .. } = state;
    for mut reader in readers {
        reader.execute(&Command::LeaveRing)?;
        reader.finish()?;
    }
    ring.close(TIMEOUT)?;
    settle()
}

fn ours(state: &mut State) -> Result<f64> {
    let waited = host_waits(state)?;
    for reader in &mut state.readers {
        // Readers that wait on the host do so while this process publishes.
        reader.send(&Command::CopyBuckets { buckets: state.weights.len() })?;
    }
    if !state.ring.waits_on_host() {
        state.readers.iter_mut().try_for_each(Remote::wait_done)?;
    }
    let begin = Instant::now();
    for bucket in &state.weights {
        let mut slot = state.ring.write(&state.stream)?;
        slot.view_mut::<u8, _>(&state.stream)?.copy_from_device(&bucket.view::<u8, _>(&state.stream)?)?;
        slot.publish()?;
    }
    state.stream.synchronize()?;
    if state.ring.waits_on_host() {
        state.readers.iter_mut().try_for_each(Remote::wait_done)?;
    }
    state.readers.iter_mut().try_for_each(|reader| reader.send(&Command::Synchronize))?;
    state.readers.iter_mut().try_for_each(Remote::wait_done)?;
    let took = begin.elapsed();
    let waited = host_waits(state)? - waited;
    state.host_waits.push(waited as f64);
    Ok(bytes(&state.weights) * (1 + READERS) as f64 / took.as_secs_f64())
}

fn host_waits(state: &mut State) -> Result<u64> {
    let own = device_ipc::counters().ring_host_waits_total;
    state
        .readers
        .iter_mut()
        .try_fold(own, |sum, reader| Ok(sum + reader.request::<u64>(&Command::HostWaits)?))
}

fn raw(state: &mut State) -> Result<Option<f64>> {
    state.stream.synchronize()?;
    let begin = Instant::now();
    copy(state)?;
    state.stream.synchronize()?;
    Ok(Some(bytes(&state.weights) / begin.elapsed().as_secs_f64()))
}

/// Measures the copies of three processes without synchronization between them.
fn unordered(state: &mut State) -> Result<f64> {
    state.stream.synchronize()?;
    let (begin, buckets) = (Instant::now(), state.weights.len());
    state.readers.iter_mut().try_for_each(|reader| reader.send(&Command::CopyOwnBuckets { buckets }))?;
    copy(state)?;
    state.readers.iter_mut().try_for_each(Remote::wait_done)?;
    state.readers.iter_mut().try_for_each(|reader| reader.send(&Command::Synchronize))?;
    state.stream.synchronize()?;
    state.readers.iter_mut().try_for_each(Remote::wait_done)?;
    Ok(bytes(&state.weights) * (1 + READERS) as f64 / begin.elapsed().as_secs_f64())
}

fn copy(state: &State) -> Result<()> {
    for (from, to) in state.weights.iter().zip(&state.copies) {
        to.view_mut::<u8, _>(&state.stream)?.copy_from_device(&from.view::<u8, _>(&state.stream)?)?;
    }
    Ok(())
}

fn bytes(buckets: &[Buffer]) -> f64 {
    buckets.iter().map(|bucket| bucket.range().len as f64).sum()
}
