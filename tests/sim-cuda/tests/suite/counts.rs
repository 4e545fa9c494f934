//! The driver calls of each operation of the library, by name. A change that adds a call must update these lists.

use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::limits::{CacheLimits, set_cache_limits};
use device_ipc_core::{Buffer, Descriptor, Dtype, Export, Ipc, OwnedRegion, Region, TensorLayout, ViewMut};
use device_ipc_cuda::{CudaBackend, LEGACY, VIRTUAL_MEMORY};
use device_ipc_test_process::{Process, command_of_test, output_of, request};
use libloading::Library;

use super::support::Installed;

const PATIENCE: Duration = Duration::from_secs(60);

/// Number of tensors of a bundle.
const TENSORS: usize = 3;

/// Number of tensors of a large model.
const MANY: u64 = 291;

/// Bytes of the block that they lie in.
const BLOCK_BYTES: u64 = 2 << 20;

/// The calls that enter and leave a device's context for a call.
const ENTER: [&str; 3] = ["cuThreadExchangeStreamCaptureMode", "cuCtxGetId", "cuCtxPushCurrent"];
const LEAVE: [&str; 2] = ["cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"];

/// Returns the calls of an operation within a context.
fn entered(calls: &[&'static str]) -> Vec<&'static str> {
    [&ENTER, calls, &LEAVE].concat()
}

/// Queries the current context, which other code may have changed.
const LOOK: &str = "cuCtxGetCurrent";

/// Returns the calls of an operation in a context in which owners may be dropped.
fn in_context(calls: &[&'static str]) -> Vec<&'static str> {
    [&[LOOK], ENTER.as_slice(), calls, &LEAVE, &[LOOK]].concat()
}

/// The simulator that this process has loaded, which records calls.
struct Recorder(Library);

impl Recorder {
    fn new() -> Self {
        let path = std::env::var_os(device_ipc_cuda::LIBRARY_VARIABLE).expect("set by the test");
        // SAFETY: the backend has loaded the library already, and it is the simulator.
        Self(unsafe { Library::new(path) }.expect("it is loaded"))
    }

    /// Runs the operation, and returns its result and the functions that any thread called meanwhile.
    fn calls<T>(&self, operation: impl FnOnce() -> T) -> (Vec<String>, T) {
        settle();
        // SAFETY: both functions have these types in the simulator.
        let (record, recorded) = unsafe {
            let record = self.0.get::<unsafe extern "C" fn()>(b"device_ipc_sim_cuda_record\0");
            type Recorded = unsafe extern "C" fn(usize, *mut u8, usize) -> bool;
            let recorded = self.0.get::<Recorded>(b"device_ipc_sim_cuda_recorded\0");
            (record.expect("the simulator has it"), recorded.expect("the simulator has it"))
        };
        // SAFETY: the function has no arguments.
        unsafe { record() };
        let result = operation();
        let mut calls = Vec::new();
        let mut name = [0_u8; 128];
        // SAFETY: these bytes can be written.
        while unsafe { recorded(calls.len(), name.as_mut_ptr(), name.len()) } {
            let text = CStr::from_bytes_until_nul(&name).expect("it ends");
            calls.push(text.to_str().expect("a name").to_owned());
        }
        (calls, result)
    }
}

/// Waits until the worker has finished its jobs.
fn settle() {
    device_ipc_core::close_unused(PATIENCE).expect("nothing hangs");
}

fn ipc() -> Ipc {
    Ipc::with_backend(CudaBackend::load().expect("the simulator"))
}

/// Allocates by `cuMemAlloc`, also in a pid namespace, where another kind is preferred.
fn allocate(ipc: &Ipc, device: u32) -> Buffer {
    ipc.allocate_for(device, 4096, device_ipc_cuda::LEGACY).expect("memory")
}

/// Allocates the tensors of a bundle, each separately.
fn tensors(ipc: &Ipc, device: u32) -> [Arc<Buffer>; TENSORS] {
    std::array::from_fn(|_| Arc::new(allocate(ipc, device)))
}

fn bundle(ipc: &Ipc, tensors: &[Arc<Buffer>; TENSORS]) -> Export {
    let mut all = ipc.tensors();
    for (index, tensor) in tensors.iter().enumerate() {
        let layout = TensorLayout::contiguous(Dtype::U8, [4096]).expect("a layout");
        all.owned(index.to_string(), Arc::clone(tensor), Some(layout)).expect("one of its kind");
    }
    ipc.share_all(all).start().expect("shared")
}

/// Shares tensors side by side in one block, which they do not state, as those of PyTorch do not.
fn in_one_block(ipc: &Ipc, block: Buffer, count: u64) -> Export {
    let whole = block.range();
    let part = |index| whole.slice(512 * index, 64).expect("it fits");
    let mut all = ipc.tensors();
    // SAFETY: the block is the memory.
    let first = unsafe { OwnedRegion::new(block, Region::new(ipc.backend().info().name, part(0))) };
    let layout = TensorLayout::contiguous(Dtype::U8, [64]).expect("a layout");
    all.owned("0", first, Some(layout)).expect("one of its kind");
    for index in 1..count {
        let place = (whole.device, part(index).ptr);
        // SAFETY: the set has the block.
        let added = unsafe { all.further_tensor(index.to_string(), place, Dtype::U8, &[64], &[1]) };
        added.expect("one of its kind");
    }
    ipc.share_all(all).start().expect("shared")
}

/// Starts a process with two exports of one block, one export of another block that is ready behind a stream, and a
/// bundle, on this device.
fn exporter(device: u32) -> (Process, Vec<Descriptor>, Descriptor) {
    let variables = [("EXPORTER_DEVICE", &*device.to_string())];
    let process = Process::of_test(concat!(module_path!(), "::the_exporter"), &variables);
    let descriptor = || process.line(|line| line.parse().ok());
    let descriptors = (0..3).map(|_| descriptor()).collect();
    let bundle = descriptor();
    (process, descriptors, bundle)
}

#[test]
#[ignore = "the child of the other tests"]
fn the_exporter() {
    let ipc = ipc();
    let device: u32 = std::env::var("EXPORTER_DEVICE").expect("set").parse().expect("a number");
    let block = Arc::new(allocate(&ipc, device));
    let share = || ipc.share(Arc::clone(&block)).start().expect("shared");
    let stream = ipc.create_stream(device).expect("a stream");
    let gate = stream.gate().expect("closed");
    let behind = ipc.share(allocate(&ipc, device)).ready_on(&stream).start();
    let exports: [Export; 3] = [share(), share(), behind.expect("shared")];
    gate.open();
    stream.synchronize().expect("reached");
    for export in &exports {
        println!("\n{}", export.descriptor());
    }
    let bundle = bundle(&ipc, &tensors(&ipc, device));
    println!("\n{}", bundle.descriptor());
    let version = || ipc.share(ipc.allocate_for(device, 4096, VIRTUAL_MEMORY).expect("memory")).start();
    let versions = [version().expect("shared"), version().expect("shared")];
    for export in &versions {
        println!("\n{}", export.descriptor());
    }
    let sets = [LEGACY, VIRTUAL_MEMORY].map(|kind| {
        [1, MANY].map(|count| {
            let block = ipc.allocate_for(device, BLOCK_BYTES, kind).expect("memory");
            in_one_block(&ipc, block, count)
        })
    });
    for export in sets.iter().flatten() {
        println!("\n{}", export.descriptor());
    }
    // Until the parent exits, or kills this process.
    request();
}

#[test]
fn operations_make_only_listed_driver_calls() {
    let installed = Installed::new();
    let command = installed.prepare(command_of_test(concat!(module_path!(), "::operations")), "devices=2");
    let (success, text) = output_of(command, Duration::from_secs(120));
    assert!(success && text.contains("1 passed"), "{text}");
}

/// The calls do not depend on the number of blocks, also where none of them lie side by side, if the driver accepts large tables.
#[test]
fn copies_of_blocks_make_only_listed_driver_calls() {
    let installed = Installed::new();
    for (machine, launches) in [("devices=1", "1"), ("devices=1;driver=12000", "2")] {
        let mut command = command_of_test(concat!(module_path!(), "::block_copies"));
        command.env("LAUNCHES", launches);
        let (success, text) = output_of(installed.prepare(command, machine), Duration::from_secs(120));
        assert!(success && text.contains("1 passed"), "{text}");
    }
}

#[test]
#[ignore = "needs the simulator, which the test above installs"]
fn block_copies() {
    const BLOCKS: u32 = 360;
    let launches = std::env::var("LAUNCHES").expect("set").parse().expect("a number");
    let (ipc, recorder) = (ipc(), Recorder::new());
    let stream = ipc.create_stream(0).expect("a stream");
    let caches =
        [(); 2].map(|()| [(); TENSORS - 1].map(|()| ipc.allocate(0, u64::from(BLOCKS)).expect("memory")));
    let (mut targets, mut sources) = caches.into();
    for (value, cache) in (0..).zip(&mut sources) {
        cache.view_mut::<u8, _>(&stream).expect("whole").fill_bytes(value).expect("filled");
    }
    let mut views: Vec<_> = targets
        .iter_mut()
        .zip(&sources)
        .map(|(to, of)| {
            (to.view_mut::<u8, _>(&stream).expect("whole"), of.view::<u8, _>(&stream).expect("whole"))
        })
        .collect();
    let mut copy = |sources: &[u32], destinations: &[u32]| {
        recorder.calls(|| ViewMut::copy_blocks(&mut views, 1, sources, destinations).expect("copied")).0
    };
    copy(&[], &[]);
    let copied =
        |launches: usize| entered(&[&["cuStreamGetCtx"], &*vec!["cuLaunchKernel"; launches]].concat());
    assert_eq!(copy(&[5, 1, 3], &[3, 1, 5]), copied(1), "a few blocks");
    let up: Vec<u32> = (0..BLOCKS).collect();
    let down: Vec<u32> = up.iter().rev().copied().collect();
    assert_eq!(copy(&up, &down), copied(launches), "scattered blocks");
    assert_eq!(copy(&down, &down), copied(1), "blocks that descend side by side");
    for (value, (target, _)) in (0..).zip(&views) {
        assert_eq!(target.to_vec().expect("read"), vec![value; BLOCKS as usize]);
    }
}

/// The initialisation takes milliseconds each time, and PyTorch has done it.
#[test]
fn initialised_driver_is_not_initialised_again() {
    let installed = Installed::new();
    let command = installed.prepare(command_of_test(concat!(module_path!(), "::initialised")), "devices=1");
    let (success, text) = output_of(command, Duration::from_secs(120));
    assert!(success && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "needs the simulator, which the test above installs"]
fn initialised() {
    let recorder = Recorder::new();
    // SAFETY: the function has this type.
    let status = unsafe {
        let init = recorder.0.get::<unsafe extern "C" fn(u32) -> i32>(b"cuInit\0");
        init.expect("the simulator has it")(0)
    };
    assert_eq!(status, 0);
    let (calls, backend) = recorder.calls(CudaBackend::load);
    assert!(backend.is_ok() && !calls.is_empty() && !calls.contains(&"cuInit".to_owned()), "{calls:?}");
}

#[test]
#[ignore = "needs the simulator, which the test above installs"]
fn operations() {
    let ipc = ipc();
    let recorder = Recorder::new();
    exports(&ipc, &recorder);
    opens_at_home(&ipc, &recorder);
    opens_on_the_other_device(&ipc, &recorder);
    bundles(&ipc, &recorder);
    bundles_in_one_block(&ipc, &recorder);
    replacements(&ipc, &recorder);
}

/// The addresses of a mapping are reserved once; each version is imported, mapped, unmapped and released.
fn replacements(ipc: &Ipc, recorder: &Recorder) {
    let (exporter, _, _) = exporter(0);
    let [first, second] = [(); 2].map(|()| exporter.line(|line| line.parse::<Descriptor>().ok()));
    let import = entered(&[
        "cuMemGetAllocationGranularity",
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
    ]);
    let (map, unmap) = (entered(&["cuMemMap", "cuMemSetAccess"]), entered(&["cuMemUnmap"]));
    let (released, reserved) = (entered(&["cuMemRelease"]), entered(&["cuMemAddressReserve"]));
    let (opened, mut mapping) = recorder.calls(|| ipc.open(&first).reserved().at_home().expect("opened"));
    assert_eq!(opened, [&*import, &*reserved, &*map].concat(), "an open at reserved addresses");
    let (replaced, ()) = recorder.calls(|| mapping.replace(&second).expect("replaced"));
    assert_eq!(
        replaced,
        [&*import, &*unmap, &*map, &*released].concat(),
        "a replacement of memory that was not used"
    );
    let _ = mapping.range();
    let (replaced, ()) = recorder.calls(|| mapping.replace(&first).expect("replaced"));
    let waited = entered(&["cuStreamIsCapturing", "cuCtxSynchronize"]);
    assert_eq!(replaced, [&*import, &*waited, &*unmap, &*map, &*released].concat(), "a replacement");
    let (suspended, ()) = recorder.calls(|| mapping.suspend().expect("suspended"));
    assert_eq!(suspended, [&*waited, &*unmap, &*released].concat(), "a suspension");
    let (resumed, ()) = recorder.calls(|| mapping.resume(&second).expect("resumed"));
    assert_eq!(resumed, [&*import, &*map].concat(), "a resume");
    let (asked, reservation) = recorder.calls(|| ipc.reserve(0, 1).expect("reserved"));
    let unit = entered(&["cuMemGetAllocationGranularity"]);
    assert_eq!(asked, [&*unit, &*reserved].concat(), "a reservation");
    let (opened, part) =
        recorder.calls(|| ipc.open(&first).reserved_in(&reservation, 0).at_home().expect("opened"));
    assert_eq!(opened, [&*import, &*map].concat(), "an open in a reservation");
    let (ended, ()) = recorder.calls(|| {
        drop(part);
        settle();
    });
    let closed = entered(&["cuMemUnmap", "cuMemRelease"]);
    assert_eq!(ended, closed, "the drop of a mapping in a reservation");
    let (ended, ()) = recorder.calls(|| drop(reservation));
    assert_eq!(ended, entered(&["cuMemAddressFree"]), "the drop of a reservation");
    let (ended, ()) = recorder.calls(|| {
        drop(mapping);
        settle();
    });
    let freed = entered(&["cuMemAddressFree"]);
    assert_eq!(ended, [&*waited, &*closed, &*freed].concat(), "the drop of a mapping that was used");
}

/// A device's context is entered once for all calls of a bundle.
fn bundles(ipc: &Ipc, recorder: &Recorder) {
    let memory = tensors(ipc, 0);
    let asked = [LOOK, "cuPointerGetAttributes", "cuMemGetAddressRange", LOOK, "cuIpcGetMemHandle"];
    let (first, export) = recorder.calls(|| bundle(ipc, &memory));
    assert_eq!(first, in_context(&asked.repeat(TENSORS)), "the first bundle of memory");
    let (again, another) = recorder.calls(|| bundle(ipc, &memory));
    assert!(again.is_empty(), "another of the same: {again:?}");
    let (ended, ()) = recorder.calls(|| {
        drop((export, another));
        settle();
    });
    assert_eq!(ended, in_context(&[]).repeat(2), "one entry for all owners of a bundle");
    let (_exporter, _, descriptor) = exporter(0);
    let (opened, mapping) = recorder.calls(|| ipc.open(&descriptor).at_home().expect("opened"));
    let opens = [LOOK, "cuIpcOpenMemHandle", "cuMemGetAddressRange"];
    assert_eq!(opened, in_context(&opens.repeat(TENSORS)), "a bundle's first open");
    drop(mapping);
    settle();
}

/// The calls do not depend on the number of tensors in a block.
fn bundles_in_one_block(ipc: &Ipc, recorder: &Recorder) {
    let (exporter, _, _) = exporter(0);
    let descriptor = || exporter.line(|line| line.parse::<Descriptor>().ok());
    let _versions = [descriptor(), descriptor()];
    let place = [LOOK, "cuPointerGetAttributes", "cuMemGetAddressRange", LOOK];
    let legacy = (vec!["cuIpcGetMemHandle"], vec!["cuIpcOpenMemHandle", "cuMemGetAddressRange"]);
    let virtual_memory = (
        vec!["cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemRelease"],
        vec![
            "cuMemGetAllocationGranularity",
            "cuMemImportFromShareableHandle",
            "cuMemGetAllocationPropertiesFromHandle",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemRelease",
            "cuMemSetAccess",
        ],
    );
    for (kind, (handle, open)) in [(LEGACY, legacy), (VIRTUAL_MEMORY, virtual_memory)] {
        for count in [1, MANY] {
            let block = ipc.allocate_for(0, BLOCK_BYTES, kind).expect("memory");
            let (shared, export) = recorder.calls(|| in_one_block(ipc, block, count));
            assert_eq!(shared, in_context(&[&place, &*handle].concat()), "{count} tensors of {kind:?}");
            let descriptor = descriptor();
            let (opened, mapping) = recorder.calls(|| ipc.open(&descriptor).at_home().expect("opened"));
            assert_eq!(opened, entered(&open), "an open of {count} tensors of {kind:?}");
            drop((export, mapping));
            settle();
        }
    }
}

fn exports(ipc: &Ipc, recorder: &Recorder) {
    let share = |block: &Arc<Buffer>| ipc.share(Arc::clone(block)).start().expect("shared");
    let block = Arc::new(allocate(ipc, 0));
    let (first, export) = recorder.calls(|| share(&block));
    let asked = [LOOK, "cuPointerGetAttributes", "cuMemGetAddressRange", LOOK, "cuIpcGetMemHandle"];
    assert_eq!(first, in_context(&asked), "the first export of an allocation");
    let (further, another) = recorder.calls(|| share(&block));
    assert!(further.is_empty(), "a further export: {further:?}");
    let stream = ipc.create_stream(0).expect("a stream");
    let (behind, third) =
        recorder.calls(|| ipc.share(Arc::clone(&block)).ready_on(&stream).start().expect("shared"));
    assert_eq!(
        behind,
        entered(&["cuStreamGetCtx", "cuStreamIsCapturing", "cuStreamQuery"]),
        "an export behind a stream without work"
    );
    drop(stream);
    let (ended, ()) = recorder.calls(|| {
        drop((export, another, third));
        settle();
    });
    assert_eq!(ended, in_context(&[]).repeat(3), "the drop of each owner");
}

fn opens_at_home(ipc: &Ipc, recorder: &Recorder) {
    let (_exporter, descriptors, _) = exporter(0);
    let open = |index: usize| ipc.open(&descriptors[index]).at_home().expect("opened");
    let (first, mapping) = recorder.calls(|| open(0));
    assert_eq!(first, entered(&["cuIpcOpenMemHandle", "cuMemGetAddressRange"]), "the first open");
    let (further, another) = recorder.calls(|| open(1));
    assert!(further.is_empty(), "another export of the allocation: {further:?}");
    let (again, same) = recorder.calls(|| open(0));
    assert!(again.is_empty(), "the same once more: {again:?}");
    let (kept, ()) = recorder.calls(|| drop((another, same, mapping)));
    assert!(kept.is_empty(), "the end of mappings whose lease stays open: {kept:?}");
    // `settle` closes unused mappings.
    let ended = |is_used: bool| {
        let mapping = open(0);
        if is_used {
            let _ = mapping.range();
        }
        set_cache_limits(CacheLimits::NONE).expect("set");
        let (closed, ()) = recorder.calls(|| {
            drop(mapping);
            settle();
        });
        set_cache_limits(CacheLimits::default()).expect("set");
        closed
    };
    let (wait, close) =
        (entered(&["cuStreamIsCapturing", "cuCtxSynchronize"]), entered(&["cuIpcCloseMemHandle"]));
    assert_eq!(ended(true), [wait, close.clone()].concat(), "the end of the last mapping");
    assert_eq!(ended(false), close, "the end of a mapping that no device work can have used");
    let (ready, mapping) = recorder.calls(|| open(2));
    let opened = [["cuIpcOpenMemHandle", "cuMemGetAddressRange"].as_slice(), &["cuIpcOpenEventHandle"]];
    let (opened, asked) = (opened.map(entered).concat(), entered(&["cuEventQuery"]));
    let (begin, rest) = ready.split_at(opened.len());
    assert_eq!(begin, opened, "bytes that are ready behind a stream");
    assert!(rest == asked || rest == [asked.clone(), asked].concat(), "whether they are: {rest:?}");
    drop(mapping);
    settle();
}

fn opens_on_the_other_device(ipc: &Ipc, recorder: &Recorder) {
    let (_exporter, descriptors, _) = exporter(1);
    let open = |index: usize| ipc.open(&descriptors[index]).on_device(0).expect("opened");
    let (first, mapping) = recorder.calls(|| open(0));
    let opened = entered(&["cuIpcOpenMemHandle", "cuMemGetAddressRange"]);
    assert_eq!(first, [vec!["cuDeviceCanAccessPeer"], opened.clone()].concat(), "the first from that device");
    drop(mapping);
    settle();
    let (next, mapping) = recorder.calls(|| open(0));
    assert_eq!(next, opened, "whether it can be reached is known");
    drop(mapping);
    settle();
}
