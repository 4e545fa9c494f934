//! Memory that is exchanged at a reserved address, and given back and taken again.

use anyhow::Result;
use device_ipc::{Descriptor, DeviceOrdinal};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::peer::message::Command;
use crate::wait::settle;

pub(super) const ROW: Row = Row { name: "replace", title: "memory exchanged at a reserved address", run };

const SIZES: [u64; 3] = [64 << 20, 1 << 30, 16 << 30];

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for bytes in SIZES {
        let device = DeviceOrdinal::new(bench.device);
        let free = bench.ipc.backend().memory().memory_info(device)?.free_bytes;
        // Two versions on each side.
        if bytes > free / 5 {
            lines.push(bench.skipped(size(bytes), format!("{} are free", size(free))));
            continue;
        }
        measure(bench, bytes, &mut lines)?;
    }
    Ok(lines)
}

fn measure(bench: &Bench, bytes: u64, lines: &mut Vec<Line>) -> Result<()> {
    let mut exporter = bench.remote(bench.device)?;
    let versions: Vec<Descriptor> = exporter.request(&Command::ShareRemappable { blocks: 2, bytes })?;
    let stream = bench.ipc.create_stream(bench.device)?;
    let mut mapping = bench.ipc.open(&versions[0]).reserved().on(&stream)?;
    // As a program that has views of the tensors.
    let _ = mapping.range();
    let mut count = 0;
    bench.raw.enter(bench.device)?;
    let mut blocks = bench.raw.exchangeable(bench.device, bytes)?;
    let replace = Subject::new(
        format!("replace, {}", size(bytes)),
        format!("import, unmap, map, access and release of exported blocks, by {}", bench.raw.name()),
    )
    .target(Target::Times { most: 1.2, plus: 200_000.0 })
    .needs_hardware(true)
    .note("ours: with the request to the exporter, and the wait for the stream and for the bytes");
    lines.push(bench.compare(
        replace,
        &mut mapping,
        |mapping| {
            count += 1;
            timed(1, |_| Ok(mapping.replace_on(&versions[count % 2], &stream)?))
        },
        |_| blocks.as_mut().map(|blocks| timed(1, |_| blocks.exchange())).transpose(),
    )?);
    let suspend = Subject::new(format!("suspend and resume, {}", size(bytes)), "").needs_hardware(true);
    let samples: Vec<f64> = (0..bench.rounds)
        .map(|_| {
            timed(1, |_| {
                mapping.suspend()?;
                Ok(mapping.resume(&versions[0])?)
            })
        })
        .collect::<Result<_>>()?;
    lines.push(bench.figure(suspend, &samples));
    drop((mapping, blocks));
    settle()?;
    exporter.finish()
}

fn size(bytes: u64) -> String {
    if bytes < 1 << 30 { format!("{} MiB", bytes >> 20) } else { format!("{} GiB", bytes >> 30) }
}
