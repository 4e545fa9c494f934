//! Re-opening an export that this process has open, by one thread and by eight threads at once.

use std::sync::Barrier;

use anyhow::{Result, anyhow};
use device_ipc::{Descriptor, Mapping};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::raw::{RawHandle, RawMapping};
use crate::wait::settle;

pub(super) const ROW: Row =
    Row { name: "open-again", title: "re-open of an export that is already open", run };

const CALLS: usize = 1000;
const BYTES: u64 = 4 << 20;

struct State {
    threads: usize,
    descriptor: Descriptor,
    _open: Mapping,
    handle: RawHandle,
    /// Kept open if the driver opens a handle more than once.
    raw: Option<RawMapping>,
}

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut exporter = bench.remote(bench.device)?;
    let descriptors = exporter.share(1, BYTES, 1)?;
    let handles = bench.raw_handles(&mut exporter, 1, BYTES)?;
    bench.raw.enter(bench.device)?;
    let raw = bench.raw.open(&handles[0], bench.device)?;
    let second = bench.raw.open(&handles[0], bench.device).and_then(|second| bench.raw.close(second));
    let mut state = State {
        threads: 1,
        _open: bench.ipc.open(&descriptors[0]).at_home()?,
        descriptor: descriptors[0].clone(),
        handle: handles[0].clone(),
        raw: Some(raw),
    };
    if second.is_err()
        && let Some(raw) = state.raw.take()
    {
        bench.raw.close(raw)?;
    }
    let mut lines = Vec::new();
    for (threads, most) in [(1, 0.5), (8, 1.0)] {
        state.threads = threads;
        let subject = Subject::new(
            if threads == 1 { "one thread".into() } else { format!("{threads} threads at once") },
            format!("open of a handle that is open, by {}", bench.raw.name()),
        )
        .target(Target::times(most))
        .needs_hardware(true)
        .note(second.is_err().then_some("the raw backend opens a handle only once"));
        lines.push(bench.compare(
            subject,
            &mut state,
            |state| ours(bench, state),
            |state| raw_again(bench, state),
        )?);
    }
    if let Some(raw) = state.raw.take() {
        bench.raw.close(raw)?;
    }
    drop(state);
    settle()?;
    exporter.finish()?;
    Ok(lines)
}

/// Calls on several threads at once, and returns the mean time of a call in nanoseconds.
fn concurrently<T: Send>(
    threads: usize,
    call: impl Fn() -> Result<T> + Sync,
    prepare: impl Fn() -> Result<()> + Sync,
) -> Result<(f64, Vec<T>)> {
    let barrier = Barrier::new(threads);
    let one = || {
        // Written before, so that no page fault is measured on either side.
        let mut results: Vec<Option<T>> = (0..CALLS).map(|_| None).collect();
        let prepared = prepare();
        barrier.wait();
        prepared?;
        let took = timed(CALLS, |index| {
            results[index] = Some(call()?);
            Ok(())
        })?;
        Ok::<_, anyhow::Error>((took, results))
    };
    let results: Vec<Result<(f64, Vec<Option<T>>)>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        running.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    });
    let (mut sum, mut all) = (0.0, Vec::new());
    for result in results {
        let (took, results) = result?;
        sum += took;
        all.extend(results.into_iter().flatten());
    }
    Ok((sum / threads as f64, all))
}

fn ours(bench: &Bench, state: &mut State) -> Result<f64> {
    let (took, mappings) =
        concurrently(state.threads, || Ok(bench.ipc.open(&state.descriptor).at_home()?), || Ok(()))?;
    drop(mappings);
    settle()?;
    Ok(took)
}

fn raw_again(bench: &Bench, state: &mut State) -> Result<Option<f64>> {
    if state.raw.is_none() {
        return Ok(None);
    }
    let (took, mappings) = concurrently(
        state.threads,
        || bench.raw.open(&state.handle, bench.device),
        || bench.raw.enter(bench.device),
    )?;
    mappings.into_iter().try_for_each(|mapping| bench.raw.close(mapping))?;
    Ok(Some(took))
}
