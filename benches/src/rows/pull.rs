//! A copy from another process as if it were on another host, beside the transfer engine's own read of as many bytes of the same kind
//! of memory.

#![allow(unsafe_code, reason = "the bare read writes to memory by its address")]

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use device_ipc::backend::engine::{Piece, PullRequest, TransferEngine};
use device_ipc::{CopyPolicy, Dtype, Ipc, Remote, TensorLayout, TensorSet};

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target, Unit};
use crate::peer::message::{Command, SharedRemotely};
use crate::peer::{BareMemory, engine};
use crate::wait::{TIMEOUT, settle};

pub(super) const ROW: Row = Row { name: "pull", title: "copy over the network, by NIXL", run };

const MIB: u64 = 1 << 20;

/// The sizes, and the names of their cases.
const SIZES: [(u64, &str); 5] =
    [(64, "64 B"), (MIB, "1 MiB"), (64 * MIB, "64 MiB"), (256 * MIB, "256 MiB"), (1024 * MIB, "1 GiB")];

/// From this size on, the speed is measured instead of the time.
const LARGE: u64 = MIB;

/// The number of calls of a round, if they take little time.
const CALLS: u64 = 16;

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let engine = match engine() {
        Ok(engine) => engine,
        Err(reason) => return Ok(vec![bench.skipped("", format!("requires NIXL: {reason:#}"))]),
    };
    let mut lines = Vec::new();
    for (bytes, size) in SIZES {
        lines.extend(measure(bench, &engine, bytes, size)?);
    }
    Ok(lines)
}

fn measure(bench: &Bench, engine: &Arc<dyn TransferEngine>, bytes: u64, size: &str) -> Result<Vec<Line>> {
    bench.raw.enter(bench.device)?;
    let mut exporter = bench.remote(bench.device)?;
    let SharedRemotely { descriptor, metadata } = exporter.request(&Command::ShareRemotely { bytes })?;
    let ipc = Ipc::builder().remote(Remote::new(Arc::clone(engine))).named(bench.backend())?;
    // The destination of the bare read.
    let memory = BareMemory::new(&ipc, bench.device, bytes)?;
    let (unit, target) = match bytes {
        ..LARGE => (Unit::Nanoseconds, Target::times(3.0)),
        LARGE => (Unit::BytesPerSecond, Target::None),
        _ => (Unit::BytesPerSecond, Target::Speed { least: 0.95 }),
    };
    let subject = |how: &str| {
        Subject::new(format!("{size}{how}"), "NIXL: a read with known metadata").unit(unit).target(target)
    };
    let read = || {
        let piece = Piece { source: 0, source_offset: 0, destination: 0, destination_offset: 0, len: bytes };
        let request =
            PullRequest { sources: &[&metadata], destinations: &[memory.range()], pieces: &[piece] };
        // SAFETY: nothing else accesses the memory, which stays allocated, until the transfer is over. After an error the transfer
        // is over, too.
        let transfer = unsafe { engine.pull(&request) }?;
        while !transfer.is_finished()? {
            std::thread::yield_now();
        }
        Ok(())
    };
    let open = || ipc.open(&descriptor).timeout(TIMEOUT);
    let to_new = |(): &mut ()| {
        let sample = sample(bytes, || {
            open().copy(CopyPolicy::Pulled).on_device(bench.device)?;
            Ok(())
        })?;
        settle()?;
        Ok(sample)
    };
    let new =
        bench.compare(subject(" to new memory"), &mut (), to_new, |()| sample(bytes, read).map(Some))?;
    // The memory of a mock's device is for one of them.
    settle()?;
    let to_existing = |set: &mut Option<TensorSet>| {
        sample(bytes, || {
            let pulled = open().pull_into(set.take().context("an earlier copy has failed")?);
            *set = Some(pulled.map_err(device_ipc::Error::from)?);
            Ok(())
        })
    };
    let mut set = Some(destination(&ipc, bench.device, bytes)?);
    let existing = bench
        .compare(subject(" to existing memory"), &mut set, to_existing, |_| sample(bytes, read).map(Some))?;
    drop((set, memory));
    settle()?;
    exporter.finish()?;
    Ok(vec![new, existing])
}

fn destination(ipc: &Ipc, device: u32, bytes: u64) -> Result<TensorSet> {
    let mut set = ipc.tensors();
    let memory = set.memory(ipc.allocate(device, bytes)?);
    set.tensor("all", memory, 0, TensorLayout::contiguous(Dtype::U8, [bytes])?)?;
    Ok(set)
}

/// Returns the time of a copy in nanoseconds, or the speed of large ones in bytes a second.
fn sample(bytes: u64, mut copy: impl FnMut() -> Result<()>) -> Result<f64> {
    let calls = if bytes < LARGE { CALLS } else { 1 };
    let begin = Instant::now();
    for _ in 0..calls {
        copy()?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    Ok(if bytes < LARGE { seconds * 1e9 / calls as f64 } else { bytes as f64 / seconds })
}
