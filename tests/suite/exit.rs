//! The end of an importer's `main` right after `release(&stream)`: its device work is complete when the exporter's wait returns. On
//! the backend that is found, or that `DEVICE_IPC_BACKEND` names; otherwise on the mock.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::roles::{argument, role as this_role, start, start_with};
use device_ipc::{Descriptor, Dtype, Error, Ipc, Result};
use device_ipc_core::TestClock;

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
    start(module_path!(), end, &[("DESCRIPTOR", &export.descriptor().to_string())]).finish();
    export.wait_released(TIMEOUT)?;
    assert_eq!(export.holders().died().len(), 0, "{end}");
    memory.view::<f32, _>(&stream)?.to_vec()
}

fn importer(end: &str, descriptor: &Descriptor) -> Result<()> {
    let ipc = ipc();
    let stream = ipc.create_stream(0)?;
    let tensor = ipc.open(descriptor).on(&stream)?;
    let gate = stream.gate()?;
    tensor.view_mut::<f32, _>(&stream)?.add(1.0)?;
    if end == "late" {
        std::mem::forget(gate);
        // The exit waits no longer than this.
        let limit = Duration::from_secs(10);
        TestClock::take().skip_wait(limit..limit + Duration::from_nanos(1));
    } else {
        // While the process exits, or after it would have, if the exit did not wait.
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            gate.open();
        });
    }
    match end {
        "release" | "late" => tensor.release(&stream)?,
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

/// On the mock alone: a kernel that does not end keeps some drivers from exiting.
#[test]
fn exit_with_endless_device_work_is_reported_as_a_death() {
    let ipc = Ipc::named("mock").expect("the mock needs no device");
    let memory = ipc.allocate(0, COUNT as u64 * 4).expect("memory");
    let export = ipc.share(memory).start().expect("it can be shared");
    let log = std::env::temp_dir().join(format!("device-ipc-exit-{}.log", std::process::id()));
    let descriptor = export.descriptor().to_string();
    let environment = [
        ("DEVICE_IPC_BACKEND", "mock".into()),
        ("DEVICE_IPC_TEST_ARGUMENT_DESCRIPTOR", descriptor.into()),
        ("DEVICE_IPC_TEST_ARGUMENT_LOG", log.clone().into_os_string()),
    ];
    start_with(module_path!(), "late", &environment).finish();
    let error = export.wait_released(TIMEOUT).expect_err("the work was lost");
    assert!(matches!(error, Error::HolderDied { .. }), "{error}");
    let text = std::fs::read_to_string(&log).expect("the importer has a log");
    std::fs::remove_file(&log).expect("the file is ours");
    let warning = text.lines().find(|line| line.contains("WARN") && line.contains("exits before"));
    let warning = warning.unwrap_or_else(|| panic!("no warning: {text}"));
    assert!(warning.contains("on device 0") && warning.contains("10 s"), "{warning}");
}

#[test]
#[ignore = "a role of the tests above"]
fn role() {
    let descriptor = argument("DESCRIPTOR").parse().expect("a descriptor");
    if this_role() == "late" {
        let log = std::fs::File::create(argument("LOG")).expect("a file");
        tracing_subscriber::fmt().with_writer(Mutex::new(log)).with_ansi(false).init();
    }
    importer(&this_role(), &descriptor).expect("the importer works");
}
