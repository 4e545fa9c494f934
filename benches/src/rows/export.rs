//! The export of a pointer, beside the two driver calls that a program without the library makes.

use std::sync::Arc;

use anyhow::Result;
use device_ipc::{Buffer, Export};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::wait::TIMEOUT;

pub(super) const ROW: Row = Row { name: "export", title: "export of a pointer", run };

const BLOCKS: usize = 64;
const BYTES: u64 = 64 * 1024;

/// Allowance for the broker's table entry beside the driver's calls, in nanoseconds.
const ENTRY: f64 = 2000.0;

struct State {
    blocks: Vec<Arc<Buffer>>,
    /// An export of each block, so that the handle of the block exists.
    _shared: Vec<Export>,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let subject = |case: &str| {
        Subject::new(case, format!("address range and handle, by {}", bench.raw.name()))
            .target(Target::Times { most: 1.1, plus: ENTRY })
            .needs_hardware(true)
    };
    bench.raw.enter(bench.device)?;
    let mut unshared = State { blocks: blocks(bench)?, _shared: Vec::new() };
    let new = bench.compare(
        subject("first of an allocation"),
        &mut unshared,
        |state| ours(bench, state),
        |state| raw(bench, state),
    )?;
    let blocks = blocks(bench)?;
    let shared = blocks.iter().map(|block| Ok(bench.ipc.share(Arc::clone(block)).start()?));
    let mut shared = State { _shared: shared.collect::<Result<_>>()?, blocks };
    let again = bench.compare(
        subject("in an allocation that is shared already"),
        &mut shared,
        |state| ours(bench, state),
        |state| raw(bench, state),
    )?;
    Ok(vec![new, again])
}

fn blocks(bench: &Bench) -> Result<Vec<Arc<Buffer>>> {
    (0..BLOCKS).map(|_| Ok(Arc::new(bench.ipc.allocate(bench.device, BYTES)?))).collect()
}

fn ours(bench: &Bench, state: &mut State) -> Result<f64> {
    let mut exports = Vec::with_capacity(BLOCKS);
    let took = timed(BLOCKS, |index| {
        exports.push(bench.ipc.share(Arc::clone(&state.blocks[index])).start()?);
        Ok(())
    })?;
    for export in exports {
        export.close(TIMEOUT)?;
    }
    Ok(took)
}

fn raw(bench: &Bench, state: &mut State) -> Result<Option<f64>> {
    let mut exports = Vec::with_capacity(BLOCKS);
    let took = timed(BLOCKS, |index| {
        exports.push(bench.raw.export(state.blocks[index].range())?);
        Ok(())
    })?;
    exports.into_iter().try_for_each(|export| bench.raw.unexport(export))?;
    Ok(Some(took))
}
