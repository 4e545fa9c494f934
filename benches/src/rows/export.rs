//! The export of a pointer, beside the two driver calls that a program without the library makes.

use std::sync::Arc;

use anyhow::Result;
use device_ipc::Export;

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::wait::TIMEOUT;

pub(super) const ROW: Row = Row { name: "export", title: "export of a pointer", run };

const BLOCKS: usize = 64;
const BYTES: u64 = 64 * 1024;

/// Allowance for the broker's table entry beside the driver's calls, in nanoseconds.
const ENTRY: f64 = 2000.0;

fn run(bench: &Bench) -> Result<Vec<Line>> {
    bench.raw.enter(bench.device)?;
    let mut lines = Vec::new();
    for (case, is_shared) in
        [("first of an allocation", false), ("in an allocation that is shared already", true)]
    {
        let blocks: Vec<_> = (0..BLOCKS)
            .map(|_| Ok(Arc::new(bench.ipc.allocate(bench.device, BYTES)?)))
            .collect::<Result<_>>()?;
        let share = |block| Ok(bench.ipc.share(Arc::clone(block)).start()?);
        // The handle of a block exists as long as an export of it.
        let _shared: Vec<Export> = blocks.iter().filter(|_| is_shared).map(share).collect::<Result<_>>()?;
        let subject = Subject::new(case, format!("address range and handle, by {}", bench.raw.name()))
            .target(Target::Times { most: 1.1, plus: ENTRY })
            .needs_hardware(true);
        let ours = |(): &mut ()| {
            let mut exports = Vec::with_capacity(BLOCKS);
            let took = timed(BLOCKS, |index| {
                exports.push(share(&blocks[index])?);
                Ok(())
            })?;
            exports.into_iter().try_for_each(|export| export.close(TIMEOUT))?;
            Ok(took)
        };
        let raw = |(): &mut ()| {
            let mut exports = Vec::with_capacity(BLOCKS);
            let took = timed(BLOCKS, |index| {
                exports.push(bench.raw.export(blocks[index].range())?);
                Ok(())
            })?;
            exports.into_iter().try_for_each(|export| bench.raw.unexport(export))?;
            Ok(Some(took))
        };
        lines.push(bench.compare(subject, &mut (), ours, raw)?);
    }
    Ok(lines)
}
