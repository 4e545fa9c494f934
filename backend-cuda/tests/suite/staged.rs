//! Copies through host memory: between two devices, each hidden from the other process, and between two allocations of
//! one device. `--nocapture` shows the bytes per second. Without enough GPUs, each test reports it and passes.

use std::time::{Duration, Instant};

use crate::gpu::backend;
use device_ipc_core::backend::DeviceIpc;
use device_ipc_core::{CopyPolicy, Descriptor, Error, Ipc, Mapping, Result};
use device_ipc_cuda::CudaBackend;
use device_ipc_test_process::{Process, serve};

const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const SOON: Duration = Duration::from_secs(60);
const ROUNDS: usize = 5;

/// The number of bytes to copy: enough to measure a rate, and an eighth of the memory of a small device.
const MOST: u64 = 1 << 30;

/// Returns the identities of the devices in the format of the variable.
fn devices() -> Vec<String> {
    let Some((backend, _alone)) = backend() else { return Vec::new() };
    backend.devices().unwrap().iter().map(|device| format!("GPU-{}", device.identity)).collect()
}

fn with_visible(device: &str) -> Process {
    Process::of_test(concat!(module_path!(), "::the_other_process"), &[(VARIABLE, device)])
}

fn copy_between(home: &str, away: &str) {
    let (mut exporter, mut importer) = (with_visible(home), with_visible(away));
    let descriptor = exporter.ask("share 9");
    for round in 0..ROUNDS {
        let answer = importer.ask(&format!("copy {descriptor}"));
        assert!(answer.starts_with("a copy of 9, "), "{answer}");
        eprintln!("{home} to {away}, round {round}: {answer}");
    }
    // The export is released, and a later export is copied later.
    assert_eq!(exporter.ask("held"), "0");
    assert_eq!(exporter.ask("fill 5"), "filled");
    let answer = importer.ask(&format!("copy {descriptor}"));
    assert!(answer.starts_with("a copy of 5, "), "{answer}");
    importer.finish();
    exporter.finish();
}

#[test]
fn memory_of_hidden_device_is_copied_and_marked_as_copy() {
    match devices().as_slice() {
        [first, second, ..] => copy_between(first, second),
        _ => eprintln!("skipped: needs two devices"),
    }
}

#[test]
fn memory_of_same_device_is_copied_on_request() {
    match devices().as_slice() {
        [only, ..] => copy_between(only, only),
        [] => eprintln!("skipped: no device"),
    }
}

#[test]
fn memory_of_hidden_device_error_suggests_staging() {
    let [first, second, ..] = &devices()[..] else { return eprintln!("skipped: needs two devices") };
    let (mut exporter, mut importer) = (with_visible(first), with_visible(second));
    let descriptor = exporter.ask("share 3");
    let refusal = importer.ask(&format!("home {descriptor}"));
    assert!(refusal.contains("StagedIfNeeded") && refusal.contains(VARIABLE), "{refusal}");
    let answer = importer.ask(&format!("any {descriptor}"));
    assert!(answer.starts_with("a copy of 3, ") || answer.starts_with("a mapping of 3, "), "{answer}");
    eprintln!("memory of a hidden card as a staged copy: {answer}");
    importer.finish();
    exporter.finish();
}

#[test]
#[ignore = "the child of the other tests"]
fn the_other_process() {
    let backend = CudaBackend::load().unwrap();
    let ipc = Ipc::with_backend(backend.clone());
    let stream = ipc.create_stream(0).unwrap();
    let mut shared = None;
    serve(|request, argument| match request {
        "share" => {
            let total = backend.memory().memory_info(stream.device()).unwrap().total_bytes;
            let buffer = std::sync::Arc::new(ipc.allocate(0, MOST.min(total / 8)).unwrap());
            buffer.view_mut::<u8, _>(&stream).unwrap().fill_bytes(argument.parse().unwrap()).unwrap();
            stream.synchronize().unwrap();
            let export = ipc.share(buffer.clone()).start().unwrap();
            let descriptor = export.descriptor().to_string();
            shared = Some((buffer, export));
            descriptor
        }
        "fill" => {
            let (buffer, _) = shared.as_ref().unwrap();
            buffer.view_mut::<u8, _>(&stream).unwrap().fill_bytes(argument.parse().unwrap()).unwrap();
            stream.synchronize().unwrap();
            "filled".to_owned()
        }
        "held" => {
            let (_, export) = shared.as_ref().unwrap();
            // A copy releases its lease by a message.
            let until = Instant::now() + SOON;
            while export.holders().iter().len() > 0 && Instant::now() < until {
                std::thread::yield_now();
            }
            export.holders().iter().len().to_string()
        }
        _ => {
            let descriptor: Descriptor = argument.parse().unwrap();
            let open = ipc.open(&descriptor);
            let begun = Instant::now();
            let opened = match request {
                "copy" => open.copy(CopyPolicy::Staged).on(&stream),
                "any" => open.copy(CopyPolicy::StagedIfNeeded).on(&stream),
                _ => open.copy(CopyPolicy::StagedIfNeeded).at_home(),
            };
            let took = begun.elapsed();
            opened.and_then(|mapping| describe(&mapping, &ipc, took)).unwrap_or_else(|error| text(&error))
        }
    });
}

fn describe(mapping: &Mapping, ipc: &Ipc, took: Duration) -> Result<String> {
    let stream = ipc.create_stream(mapping.device())?;
    let bytes = mapping.view::<u8, _>(&stream)?.to_vec()?;
    // One comparison, which is fast even without optimisation.
    assert!(bytes[1..] == bytes[..bytes.len() - 1], "all bytes are the same");
    let (what, rate) =
        (if mapping.is_copy() { "copy" } else { "mapping" }, bytes.len() as f64 / took.as_secs_f64());
    Ok(format!("a {what} of {}, {} bytes in {took:?}: {:.2} GB/s", bytes[0], bytes.len(), rate / 1e9))
}

fn text(error: &Error) -> String {
    error.to_string()
}
