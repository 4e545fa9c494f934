//! The end of an importer's `main` right after `release(&stream)`: its device work is complete when the exporter's wait returns. On
//! the backend that is found, or that `DEVICE_IPC_BACKEND` names; otherwise on the mock.

mod support;

use std::sync::Arc;
use std::time::Duration;

use device_ipc::{Descriptor, Dtype, Ipc, Result};
use support::{argument, role as this_role, start};

const COUNT: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

fn ipc() -> Ipc {
    Ipc::auto().or_else(|_| Ipc::named("mock")).expect("the mock needs no device")
}

/// Runs an importer with this end. Returns the floats after the wait for its release.
fn floats_after(end: &str) -> Result<Vec<f32>> {
    let ipc = ipc();
    let stream = ipc.create_stream(0)?;
    let memory = Arc::new(ipc.allocate(0, COUNT as u64 * 4)?);
    memory.view_mut::<f32, _>(&stream)?.copy_from(&vec![1.0; COUNT])?;
    let export =
        ipc.share(Arc::clone(&memory)).dtype(Dtype::F32).shape([COUNT as u64]).ready_on(&stream).start()?;
    start(end, &[("DESCRIPTOR", &export.descriptor().to_string())]).finish();
    export.wait_released(TIMEOUT)?;
    assert_eq!(export.holders().died().len(), 0, "{end}");
    memory.view::<f32, _>(&stream)?.to_vec()
}

fn importer(end: &str, descriptor: &Descriptor) -> Result<()> {
    let ipc = ipc();
    let stream = ipc.create_stream(0)?;
    let tensor = ipc.open(descriptor).on(&stream)?;
    stream.delay(Duration::from_secs(1))?;
    tensor.view_mut::<f32, _>(&stream)?.add(1.0)?;
    match end {
        "release" => tensor.release(&stream)?,
        "drop" => drop(tensor),
        "exit" => std::process::exit(0),
        _ => panic!("no end: {end}"),
    }
    Ok(())
}

#[test]
fn importer_that_exits_loses_no_device_work() {
    for end in ["release", "drop", "exit"] {
        let floats = floats_after(end).expect("the exporter works");
        assert!(floats.iter().all(|float| *float == 2.0), "{end}: {:?}", &floats[..4]);
    }
}

#[test]
#[ignore = "a role of the test above"]
fn role() {
    let descriptor = argument("DESCRIPTOR").parse().expect("a descriptor");
    importer(&this_role(), &descriptor).expect("the importer works");
}
