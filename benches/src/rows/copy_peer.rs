//! A copy from a mapping of another device's memory.

#![allow(unsafe_code, reason = "raw copies between buffers that live as long as the row")]

use std::time::Instant;

use anyhow::Result;
use device_ipc::{AsStream, Buffer, Mapping, Stream};

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target, Unit};
use crate::wait::settle;

pub(super) const ROW: Row = Row { name: "copy-peer", title: "copy from a mapping of another device", run };

const MIB: u64 = 1 << 20;

struct State {
    mapping: Mapping,
    /// The destination of both copies.
    here: Buffer,
    /// A buffer of this process on the other device.
    there: Buffer,
    stream: Stream,
    bytes: u64,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    if !bench.has_peer_device()? {
        return Ok(vec![bench.skipped("", "requires two devices with peer access")]);
    }
    let sizes: &[u64] = if bench.hardware { &[256, 1024, 4096] } else { &[4, 16] };
    sizes.iter().map(|size| measure(bench, size * MIB)).collect()
}

fn measure(bench: &Bench, bytes: u64) -> Result<Line> {
    let mut exporter = bench.remote(bench.other)?;
    let descriptors = exporter.share(1, bytes, 1)?;
    let stream = bench.ipc.create_stream(bench.device)?;
    let mut state = State {
        mapping: bench.ipc.open(&descriptors[0]).on(&stream)?,
        here: bench.ipc.allocate(bench.device, bytes)?,
        there: bench.ipc.allocate(bench.other, bytes)?,
        stream,
        bytes,
    };
    let subject = Subject::new(
        format!("{} MiB", bytes / MIB),
        format!("copy between two devices in one process, by {}", bench.raw.name()),
    )
    .unit(Unit::BytesPerSecond)
    .target(Target::Speed { least: 0.98 })
    .needs_hardware(true);
    let line = bench.compare(subject, &mut state, ours, |state| raw(bench, state))?;
    drop(state);
    settle()?;
    exporter.finish()?;
    Ok(line)
}

fn ours(state: &mut State) -> Result<f64> {
    let source = state.mapping.view::<u8, _>(&state.stream)?;
    let mut target = state.here.view_mut::<u8, _>(&state.stream)?;
    state.stream.synchronize()?;
    let begin = Instant::now();
    target.copy_from_device(&source)?;
    speed(state, begin)
}

fn raw(bench: &Bench, state: &mut State) -> Result<Option<f64>> {
    state.stream.synchronize()?;
    let begin = Instant::now();
    // SAFETY: both buffers live in `state`, which outlives the synchronisation.
    unsafe { bench.raw.copy_peer(state.here.range(), state.there.range(), state.stream.as_stream())? };
    speed(state, begin).map(Some)
}

fn speed(state: &State, begin: Instant) -> Result<f64> {
    state.stream.synchronize()?;
    Ok(state.bytes as f64 / begin.elapsed().as_secs_f64())
}
