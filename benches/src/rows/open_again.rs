//! Re-opening an export that this process has open, by one thread and by eight threads at once.

use std::sync::Barrier;

use anyhow::{Result, anyhow};

use crate::frame::{Bench, Row, timed};
use crate::line::{Line, Subject, Target};
use crate::wait::settle;

pub(super) const ROW: Row =
    Row { name: "open-again", title: "re-open of an export that is already open", run };

const CALLS: usize = 1000;
const BYTES: u64 = 4 << 20;

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut exporter = bench.remote(bench.device)?;
    let descriptors = exporter.share(1, BYTES, 1)?;
    let handles = bench.raw_handles(&mut exporter, 1, BYTES)?;
    bench.raw.enter(bench.device)?;
    let raw = bench.raw.open(&handles[0], bench.device)?;
    let second = bench.raw.open(&handles[0], bench.device).and_then(|second| bench.raw.close(second));
    // Kept open if the driver opens a handle more than once.
    let (raw, only_once) = if second.is_ok() {
        (Some(raw), None)
    } else {
        bench.raw.close(raw)?;
        (None, Some("the raw backend opens a handle only once"))
    };
    let open = bench.ipc.open(&descriptors[0]).at_home()?;
    let mut lines = Vec::new();
    for (threads, most) in [(1, 0.5), (8, 1.0)] {
        let subject = Subject::new(
            if threads == 1 { "one thread".into() } else { format!("{threads} threads at once") },
            format!("open of a handle that is open, by {}", bench.raw.name()),
        )
        .target(Target::times(most))
        .needs_hardware(true)
        .note(only_once);
        let ours = |(): &mut ()| {
            let again = || Ok(bench.ipc.open(&descriptors[0]).at_home()?);
            let (took, mappings) = concurrently(threads, again, || Ok(()))?;
            drop(mappings);
            settle()?;
            Ok(took)
        };
        let raw = |(): &mut ()| {
            if only_once.is_some() {
                return Ok(None);
            }
            let again = || bench.raw.open(&handles[0], bench.device);
            let (took, mappings) = concurrently(threads, again, || bench.raw.enter(bench.device))?;
            mappings.into_iter().try_for_each(|mapping| bench.raw.close(mapping))?;
            Ok(Some(took))
        };
        lines.push(bench.compare(subject, &mut (), ours, raw)?);
    }
    raw.map_or(Ok(()), |raw| bench.raw.close(raw))?;
    drop(open);
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
