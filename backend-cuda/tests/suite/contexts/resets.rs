//! Device resets by other code of the process, after which every call returns an error.

use std::sync::Arc;

use super::{EXPORTER, Foreign, Pages, SOON, ZERO};
use crate::gpu::backend;
use crate::raw::Raw;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, TestKernels};
use device_ipc_core::{Access, DevicePtr, Result};
use device_ipc_cuda::{CudaBackend, VIRTUAL_MEMORY};
use device_ipc_test_process::{Process, serve};

#[test]
fn device_reset_is_reported_as_error() {
    check_reset("alone");
}

#[test]
fn device_reset_and_retain_is_reported_as_error() {
    check_reset("retained");
}

fn check_reset(how: &str) {
    let Some((backend, _alone)) = backend() else { return };
    if how == "retained" && !Raw::of(&backend).has("cuCtxGetId") {
        eprintln!("skipped: drivers before CUDA 12 have no context ids");
        return;
    }
    let mut exporter = Process::of_test(EXPORTER, &[]);
    let handles = exporter.ask("export");
    let mut resetting = Process::of_test(concat!(module_path!(), "::the_resetting_process"), &[]);
    assert_eq!(resetting.ask(&format!("{how} {handles}")), "every call said it");
    resetting.finish();
    assert_eq!(exporter.ask("export"), handles, "the exporter is as it was");
    exporter.finish();
}

#[test]
#[ignore = "the child of the other tests"]
fn the_resetting_process() {
    serve(|how, handles| {
        let backend = CudaBackend::load().unwrap();
        let raw = Raw::of(&backend);
        reset_under(&backend, &Foreign::parse(handles), || {
            raw.reset_primary(0);
            if how == "retained" {
                raw.retain_primary(0);
            }
        });
        let mut ran = false;
        backend.with_device_context(ZERO, &mut || ran = true);
        assert!(ran, "an owner is dropped although its device was reset");
        // A new backend can use the device again.
        let anew = CudaBackend::load().unwrap();
        let range = anew.allocate(ZERO, 64).unwrap();
        let stream = anew.create_stream(ZERO).unwrap();
        let mut bytes = [0; 64];
        // SAFETY: the range is ours, and all of it is on one stream.
        unsafe {
            anew.fill(range, 5, stream.as_borrowed()).unwrap();
            anew.read(range, &mut bytes, stream.as_borrowed()).unwrap();
            anew.free(range).unwrap();
        }
        assert_eq!(bytes, [5; 64]);
        drop(backend);
        anew.synchronize_device(ZERO).unwrap();
        "every call said it".to_owned()
    });
}

fn reset_under(backend: &Arc<CudaBackend>, foreign: &Foreign, reset: impl FnOnce()) {
    let range = backend.allocate(ZERO, 4096).unwrap();
    let extent = backend.extents_of(range, None).unwrap().remove(0);
    let exported = backend.export(&extent, None).unwrap();
    let opened = backend.open(vec![foreign.received()], ZERO, Access::ReadWrite).unwrap();
    let mapped = opened.range.slice(0, 4096).unwrap();
    let (own, theirs) =
        (backend.create_event(ZERO).unwrap(), backend.open_event(&foreign.event, ZERO).unwrap());
    let stream = backend.create_stream(ZERO).unwrap();
    let on = stream.as_borrowed();
    let pages = Pages::map();
    let timelines = backend.timelines().unwrap();
    let has_timelines = backend.capabilities(ZERO).unwrap().timelines;
    let mut bytes = vec![0; 4096];
    // SAFETY: the memory is ours or mapped, the pages outlive the process's use of them.
    let word = unsafe {
        backend.write(range, &bytes, on).unwrap();
        backend.add_f32(range, 1.0, on).unwrap();
        backend.fill(mapped, 1, on).unwrap();
        own.record(on).unwrap();
        backend.synchronize(on).unwrap();
        if has_timelines {
            timelines.register(ZERO, pages.0, Pages::LEN).unwrap()
        } else {
            DevicePtr::new(64)
        }
    };
    reset();
    // SAFETY: none of these calls reaches the driver.
    let mut calls: Vec<(&str, Result<()>)> = unsafe {
        vec![
            ("allocate", backend.allocate(ZERO, 64).map(drop)),
            ("allocate_as", backend.allocate_as(ZERO, 64, VIRTUAL_MEMORY).map(drop)),
            ("memory_info", backend.memory_info(ZERO).map(drop)),
            ("fill", backend.fill(range, 1, on)),
            ("fill of the mapping", backend.fill(mapped, 1, on)),
            ("copy", backend.copy(range, mapped, on)),
            ("write", backend.write(range, &bytes, on)),
            ("read", backend.read(mapped, &mut bytes, on)),
            ("add_f32", backend.add_f32(range, 1.0, on)),
            ("host_function", backend.host_function(Box::new(|| ()), on)),
            ("synchronize", backend.synchronize(on)),
            ("synchronize_device", backend.synchronize_device(ZERO)),
            ("create_stream", backend.create_stream(ZERO).map(drop)),
            ("create_event", backend.create_event(ZERO).map(drop)),
            ("open_event", backend.open_event(&foreign.event, ZERO).map(drop)),
            ("own.export", own.export().map(drop)),
            ("own.record", own.record(on)),
            ("own.wait_on", own.wait_on(on)),
            ("own.query", own.query().map(drop)),
            ("own.synchronize", own.synchronize(SOON)),
            ("theirs.wait_on", theirs.wait_on(on)),
            ("theirs.query", theirs.query().map(drop)),
            ("extents_of", backend.extents_of(range, None).map(drop)),
            ("export", backend.export(&extent, None).map(drop)),
            ("open", backend.open(vec![foreign.received()], ZERO, Access::ReadWrite).map(drop)),
            ("free", backend.free(range)),
            ("close", backend.close(opened)),
        ]
    };
    if has_timelines {
        // SAFETY: as above.
        calls.extend(unsafe {
            [
                ("write_value", timelines.write_value(word, 1, on)),
                ("wait_value", timelines.wait_value(word, 1, on)),
                ("register", timelines.register(ZERO, pages.0, Pages::LEN).map(drop)),
                ("unregister", timelines.unregister(ZERO, pages.0)),
            ]
        });
    }
    for (call, result) in calls {
        let text = result.expect_err(call).to_string();
        assert!(text.contains("The device was reset in this process"), "{call}: {text}");
    }
    backend.unexport(exported).unwrap();
    drop((own, theirs, stream));
}
