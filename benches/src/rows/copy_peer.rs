//! A copy from a mapping of another device's memory.

#![allow(unsafe_code, reason = "raw copies between buffers that live as long as the row")]

use std::time::Instant;

use anyhow::Result;
use device_ipc::{AsStream, Buffer};

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target, Unit};
use crate::wait::settle;

pub(super) const ROW: Row = Row { name: "copy-peer", title: "copy from a mapping of another device", run };

const MIB: u64 = 1 << 20;

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
    let mapping = bench.ipc.open(&descriptors[0]).on(&stream)?;
    // The destination of both copies, and a buffer of this process on the other device.
    let (mut here, there) =
        (bench.ipc.allocate(bench.device, bytes)?, bench.ipc.allocate(bench.other, bytes)?);
    let subject = Subject::new(
        format!("{} MiB", bytes / MIB),
        format!("copy between two devices in one process, by {}", bench.raw.name()),
    )
    .unit(Unit::BytesPerSecond)
    .target(Target::Speed { least: 0.98 })
    .needs_hardware(true);
    let speed = |submit: &mut dyn FnMut() -> Result<()>| {
        stream.synchronize()?;
        let begin = Instant::now();
        submit()?;
        stream.synchronize()?;
        Ok(bytes as f64 / begin.elapsed().as_secs_f64())
    };
    let ours = |here: &mut Buffer| {
        let source = mapping.view::<u8, _>(&stream)?;
        let mut target = here.view_mut::<u8, _>(&stream)?;
        speed(&mut || Ok(target.copy_from_device(&source)?))
    };
    let raw = |here: &mut Buffer| {
        // SAFETY: both buffers outlive the synchronization.
        let copy = || unsafe { bench.raw.copy_peer(here.range(), there.range(), stream.as_stream()) };
        speed(&mut { copy }).map(Some)
    };
    let line = bench.compare(subject, &mut here, ours, raw)?;
    drop((mapping, here, there));
    settle()?;
    exporter.finish()?;
    Ok(line)
}
