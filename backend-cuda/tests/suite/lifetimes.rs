//! Lifetimes on a real GPU: hazards of the raw driver that device-ipc prevents, and no leaks when either side is
//! killed. Without a GPU, each test reports it and passes.

use std::time::{Duration, Instant};

use crate::gpu::backend;
use device_ipc_core::backend::{DeviceIpc, HandleBytes, ReceivedHandle};
use device_ipc_core::{
    Access, Descriptor, DeviceOrdinal, DeviceOwner, DeviceRange, Error, Ipc, ProcessIdentity,
};
use device_ipc_cuda::{CudaBackend, LEGACY};
use device_ipc_test_process::{Process, hex, serve, unhex};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const SOON: Duration = Duration::from_secs(30);
const BYTES: u64 = 64 << 20;

/// Rounds of the kill tests; use 200 or more for long runs.
fn rounds() -> u32 {
    std::env::var("DEVICE_IPC_KILL_ROUNDS").map_or(3, |rounds| rounds.parse().expect("a number of rounds"))
}

/// Returns the free memory of the device after the driver has removed the contexts of killed processes, which it does
/// asynchronously.
fn free_bytes(backend: &CudaBackend) -> u64 {
    let free = || backend.memory().memory_info(ZERO).unwrap().free_bytes;
    let (begin, mut last, mut same) = (Instant::now(), free(), 0);
    while same < 10 && begin.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(20));
        let now = free();
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    last
}

fn other_process() -> Process {
    Process::of_test(concat!(module_path!(), "::the_other_process"), &[])
}

#[test]
fn stale_raw_handle_opens_another_block_but_descriptor_fails() {
    let Some((backend, _alone)) = backend() else { return };
    let ipc = Ipc::with_backend(backend.clone());
    let mut other = other_process();
    let fill = |range: DeviceRange, byte: u8| {
        let stream = backend.memory().create_stream(ZERO).unwrap();
        // SAFETY: the range is ours, and the work has finished before others read it.
        unsafe { backend.memory().fill(range, byte, stream.as_borrowed()).unwrap() };
        backend.memory().synchronize(stream.as_borrowed()).unwrap();
    };

    let first = ipc.allocate_for(0, BYTES, LEGACY).unwrap();
    fill(first.range(), 1);
    let extent = backend.extents_of(first.range(), None).unwrap()[0];
    let handle = hex(backend.export(&extent, None).unwrap().bytes.as_slice());
    let (address, generation) = (first.range().ptr, extent.generation);
    // SAFETY: broken on purpose: the memory is freed while the export lives.
    let borrowed = unsafe { ipc.share_borrowed(first.region()) }.start().unwrap();
    let dropped = borrowed.descriptor().to_string();
    assert_eq!(other.ask(&format!("look {dropped}")), "1", "before the memory is freed");
    drop(first);

    // The driver usually allocates the next block of the same size at the old address.
    let second = ipc.allocate_for(0, BYTES, LEGACY).unwrap();
    assert_eq!(second.range().ptr, address, "the driver put the new block elsewhere; nothing is shown");
    let extent = backend.extents_of(second.range(), None).unwrap()[0];
    assert_ne!(extent.generation, generation);
    fill(second.range(), 2);
    // Without this the driver refuses (CUDA_ERROR_NOT_PERMITTED): the new block must also be shared.
    backend.export(&extent, None).unwrap();
    assert_eq!(other.ask(&format!("raw {handle}")), "2", "the raw handle no longer opens the new block");
    assert_eq!(other.ask(&format!("look {dropped}")), "StaleGeneration", "the export still lives");
    drop(borrowed);
    assert_eq!(other.ask(&format!("look {dropped}")), "ExportDropped");
}

#[test]
fn killed_importers_leak_no_memory() {
    let Some((backend, _alone)) = backend() else { return };
    let ipc = Ipc::with_backend(backend.clone());
    drop(ipc.allocate(0, BYTES).unwrap());
    let before = free_bytes(&backend);
    for round in 0..rounds() {
        let share = ipc.share(ipc.allocate(0, BYTES).unwrap()).start().unwrap();
        let mut other = other_process();
        assert_eq!(other.ask(&format!("hold {}", share.descriptor())), "held");
        assert_eq!(share.holders().iter().len(), 1);
        other.kill();
        assert!(matches!(share.wait_released(SOON), Err(Error::HolderDied { .. })), "round {round}");
        share.close(SOON).unwrap();
        assert_eq!(free_bytes(&backend), before, "round {round}");
    }
}

#[test]
fn memory_of_killed_exporters_is_freed_by_one_call() {
    let Some((backend, _alone)) = backend() else { return };
    let ipc = Ipc::with_backend(backend.clone());
    drop(ipc.allocate(0, BYTES).unwrap());
    // The first mapping of a process may make the driver reserve memory permanently.
    let mut before = None;
    for round in 0..=rounds() {
        let mut other = other_process();
        let descriptor: Descriptor = other.ask("share").parse().unwrap();
        let mapping = ipc.open(&descriptor).at_home().unwrap();
        let (sender, notifications) = std::sync::mpsc::channel();
        mapping.on_gone(move |why| sender.send(why.to_string()).unwrap());
        other.kill();
        assert!(notifications.recv_timeout(SOON).unwrap().contains("has terminated"));
        // SAFETY: no work on the memory is submitted any longer.
        assert_eq!(unsafe { device_ipc_core::close_mappings_of(descriptor.exporter()) }.unwrap(), 1);
        let stream = ipc.create_stream(0).unwrap();
        assert!(matches!(mapping.view::<u8, _>(&stream), Err(Error::ExporterGone { .. })));
        drop((mapping, stream));
        let free = free_bytes(&backend);
        assert_eq!(free, *before.get_or_insert(free), "round {round}");
    }
}

#[test]
#[ignore = "the child of the other tests"]
fn the_other_process() {
    let backend = CudaBackend::load().unwrap();
    let ipc = Ipc::with_backend(backend.clone());
    let mut held = Vec::new();
    let mut shared = Vec::new();
    serve(|request, argument| {
        match request {
            "raw" => first_byte_of(&backend, argument).to_string(),
            "share" => {
                shared.push(ipc.share(ipc.allocate(0, BYTES).unwrap()).start().unwrap());
                shared.last().unwrap().descriptor().to_string()
            }
            _ => match ipc.open(&argument.parse().unwrap()).at_home() {
                Ok(mapping) if request == "hold" => {
                    held.push(mapping);
                    "held".to_owned()
                }
                Ok(mapping) => {
                    let stream = ipc.create_stream(0).unwrap();
                    let byte = mapping.view::<u8, _>(&stream).unwrap().to_vec().unwrap()[0];
                    drop(mapping);
                    // Otherwise the driver would keep the block for this process even after its owner frees it.
                    device_ipc_core::close_unused(SOON).unwrap();
                    byte.to_string()
                }
                Err(Error::ExportDropped { .. }) => "ExportDropped".to_owned(),
                Err(Error::StaleGeneration(_)) => "StaleGeneration".to_owned(),
                Err(error) => error.to_string(),
            },
        }
    });
}

/// Reads through a kept handle, like a program without device-ipc.
fn first_byte_of(backend: &CudaBackend, handle: &str) -> u8 {
    let handle = ReceivedHandle {
        kind: LEGACY,
        bytes: HandleBytes::new(unhex(handle)),
        fds: Vec::new(),
        size: BYTES,
        generation: None,
        home: Some(ZERO),
        home_identity: None,
        exporter: ProcessIdentity::current().unwrap(),
    };
    let opened = backend.open(vec![handle], ZERO, Access::ReadWrite).unwrap();
    let stream = backend.memory().create_stream(ZERO).unwrap();
    let mut byte = [0];
    // SAFETY: the range is mapped.
    unsafe {
        backend.memory().read(opened.range.slice(0, 1).unwrap(), &mut byte, stream.as_borrowed()).unwrap()
    };
    backend.close(opened).unwrap();
    byte[0]
}
