//! Many importers and many exports: the time to open and to revoke all of them as a function of their number.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use device_ipc::Export;

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target, Unit};
use crate::peer::Remote;
use crate::peer::message::Command;
use crate::statistics::growth;
use crate::wait::until;

pub(super) const ROW: Row = Row { name: "many", title: "many importers, many exports", run };

/// Divisors of the number of exports that are measured.
const STEPS: [usize; 4] = [8, 4, 2, 1];

/// Maximum exponent of the fit that counts as linear growth; quadratic growth has 2.
const LINEAR: f64 = 1.15;

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let (importers, exports) = (bench.importers, bench.exports);
    bench.announce(&format!("{importers} importers, {exports} exports"));
    let mut processes = (0..importers).map(|_| bench.remote(bench.device)).collect::<Result<Vec<_>>>()?;
    let (mut opening, mut revoking) = (Vec::new(), Vec::new());
    for part in STEPS {
        let count = (exports / part).max(1);
        let leases = (importers * count) as f64;
        let (open, revoke) = step(bench, &mut processes, count)?;
        opening.push((leases, open));
        revoking.push((leases, revoke));
    }
    processes.into_iter().try_for_each(Remote::finish)?;
    Ok(vec![line(bench, "open all", opening), line(bench, "revoke all", revoking)])
}

/// Makes every process open all exports; then drops the exports and closes all mappings. Returns both times in nanoseconds.
fn step(bench: &Bench, processes: &mut [Remote], count: usize) -> Result<(f64, f64)> {
    let block = Arc::new(bench.ipc.allocate(bench.device, 1 << 20)?);
    let mut exports: Vec<Export> = Vec::with_capacity(count);
    let mut file = tempfile::NamedTempFile::new().context("cannot create a file of descriptors")?;
    for _ in 0..count {
        let export = bench.ipc.share(Arc::clone(&block)).start()?;
        writeln!(file, "{}", export.descriptor()).context("cannot write descriptors")?;
        exports.push(export);
    }
    file.flush().context("cannot write descriptors")?;
    let begin = Instant::now();
    all(processes, &Command::OpenAll { file: file.path().to_owned(), count })?;
    let opening = begin.elapsed().as_nanos() as f64;
    let begin = Instant::now();
    drop(exports);
    all(processes, &Command::CloseMappings)?;
    until("all leases have ended", || device_ipc::counters().exports == 0)
        .with_context(|| format!("{} leases are left", device_ipc::counters().leases))?;
    Ok((opening, begin.elapsed().as_nanos() as f64))
}

fn all(processes: &mut [Remote], command: &Command) -> Result<()> {
    processes.iter_mut().try_for_each(|process| process.send(command))?;
    for process in processes {
        process.wait_done()?;
    }
    Ok(())
}

fn line(bench: &Bench, case: &str, points: Vec<(f64, f64)>) -> Line {
    let subject = Subject::new(format!("{case}: growth with the number of leases"), "")
        .unit(Unit::Exponent)
        .target(Target::Most { value: LINEAR })
        .note("1 is linear growth, 2 is quadratic; the plot shows the times");
    let samples: Vec<f64> = growth(&points).into_iter().collect();
    Line { points, ..bench.figure(subject, &samples) }
}
