//! Memory and threads of the library, and its start time without a device.

use anyhow::{Result, bail};

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target, Unit};
use crate::peer::Remote;
use crate::peer::message::{Command, Reply};

pub(super) const ROW: Row =
    Row { name: "footprint", title: "memory, threads and start time of the library", run };

/// Number of objects of each kind; large, so that the doubling of tables is averaged.
const COUNT: usize = 2000;

const STARTS: usize = 20;

/// Variables with which no vendor library is found.
const NO_DEVICE: [(&str, &str); 2] = [
    (device_ipc::cuda::LIBRARY_VARIABLE, "/nowhere/libcuda.so.1"),
    (device_ipc::ascend::LIBRARY_VARIABLE, "/nowhere/libascendcl.so"),
];

fn run(bench: &Bench) -> Result<Vec<Line>> {
    let mut remote = bench.remote(bench.device)?;
    let Reply::Footprint(found) = remote.request(&Command::Footprint { count: COUNT })? else {
        bail!("protocol violation: the peer process did not reply with a footprint");
    };
    remote.finish()?;
    let line = |case: &str, unit, most, value: &[f64], note| {
        let subject = Subject {
            case: case.into(),
            against: String::new(),
            unit,
            target: Target::Most { value: most },
            needs_hardware: false,
            note,
        };
        bench.figure(subject, value)
    };
    let counted = Some("heap and guard, by a counting allocator in a separate process");
    let lease = Some("heap and guard; the first mapping of an export, with its lease");
    let starts = start_ups(bench)?;
    Ok(vec![
        line("held per export", Unit::Bytes, 1024.0, &[found.bytes_per_export], counted),
        line("held per mapping", Unit::Bytes, 512.0, &[found.bytes_per_mapping], counted),
        line("held per mapping and its lease", Unit::Bytes, 512.0, &[found.bytes_per_lease], lease),
        line("threads of a process that exports and imports", Unit::Count, 2.0, &[found.threads], None),
        line(
            "start of the library with no device",
            Unit::Nanoseconds,
            1e6,
            &starts,
            Some("the first Ipc::available() of a process"),
        ),
    ])
}

fn start_ups(bench: &Bench) -> Result<Vec<f64>> {
    let bar = bench.bar("start of the library with no device", STARTS);
    let mut starts = Vec::with_capacity(STARTS);
    for _ in 0..STARTS {
        let mut remote = Remote::start(bench.backend(), bench.device, &NO_DEVICE)?;
        let Reply::StartUp { nanoseconds } = remote.request(&Command::StartUp)? else {
            bail!("protocol violation: the peer process did not reply with its start time");
        };
        starts.push(nanoseconds);
        remote.finish()?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(starts)
}
