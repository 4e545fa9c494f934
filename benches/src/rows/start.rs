//! The start of the library in a process that finds no device.

use anyhow::Result;

use crate::frame::{Bench, Row};
use crate::line::{Line, Subject, Target};
use crate::peer::Remote;
use crate::peer::message::Command;

pub(super) const ROW: Row = Row { name: "start", title: "start of the library with no device", run };

const STARTS: usize = 20;

/// Variables with which no vendor library is found.
const NO_DEVICE: [(&str, &str); 2] = [
    (device_ipc::cuda::LIBRARY_VARIABLE, "/nowhere/libcuda.so.1"),
    (device_ipc::ascend::LIBRARY_VARIABLE, "/nowhere/libascendcl.so"),
];

fn run(bench: &Bench) -> Result<Vec<Line>> {
    bench.announce(ROW.title);
    let mut starts: Vec<f64> = Vec::with_capacity(STARTS);
    for _ in 0..STARTS {
        let mut remote = Remote::start(bench.backend(), bench.device, &NO_DEVICE)?;
        starts.push(remote.request(&Command::StartUp)?);
        remote.finish()?;
    }
    let subject = Subject::new(ROW.title, "").target(Target::Most { value: 1e6 });
    Ok(vec![bench.figure(subject.note("the first Ipc::available() of a process"), &starts)])
}
