//! Memory of every kind between two processes, on a real GPU or on a simulator. Without either, each test reports it
//! and passes.

mod blocks;
mod child;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::Duration;

use device_ipc_core::backend::{DeviceIpc, HandleBytes, HandleKind, ReceivedHandle};
use device_ipc_core::{
    Access, Buffer, Descriptor, DeviceOrdinal, DevicePtr, DeviceRange, Error, Export, ExposurePolicy, Ipc,
    OwnedRegion, ProcessIdentity, Region, close_mappings_of, close_unused,
};
use device_ipc_cuda::{CudaBackend, FABRIC, FabricSupport, LEGACY, NAME, POOL, VIRTUAL_MEMORY};
use device_ipc_test_process::Process;

use blocks::{BY_FD, Blocks, GRANULE, NO_HANDLE};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const SOON: Duration = Duration::from_secs(30);
/// A size that is not a multiple of any granularity.
const BYTES: u64 = (3 << 20) + 1000;

/// Returns the backend, for one test at a time. All tests share it, so that no test releases the context of another.
fn backend() -> Option<(Arc<CudaBackend>, MutexGuard<'static, ()>)> {
    static KEPT: OnceLock<Arc<CudaBackend>> = OnceLock::new();
    let (backend, alone) = crate::gpu::backend()?;
    Some((Arc::clone(KEPT.get_or_init(|| backend)), alone))
}

fn other_process() -> Process {
    Process::of_test(concat!(module_path!(), "::the_other_process"), &[])
}

/// Returns the kinds that this device supports. Prints the reason for the others.
fn kinds_here(backend: &CudaBackend) -> Vec<HandleKind> {
    let mut kinds: Vec<_> = backend.handle_kinds().into_iter().map(|info| info.kind).collect();
    if kinds.contains(&FABRIC) {
        let fabric = backend.fabric(0).unwrap();
        if fabric != FabricSupport::Available {
            eprintln!("skipped for the kind fabric: {fabric}");
            kinds.retain(|kind| *kind != FABRIC);
        }
    }
    kinds
}

fn has(backend: &CudaBackend, kind: HandleKind) -> bool {
    let has = kinds_here(backend).contains(&kind);
    if !has {
        eprintln!("skipped: the driver or the device has no memory of kind {}", kind.0);
    }
    has
}

fn name_of(backend: &CudaBackend, kind: HandleKind) -> &'static str {
    backend.handle_kinds().into_iter().find(|info| info.kind == kind).unwrap().name
}

fn filled(ipc: &Ipc, bytes: u64, kind: HandleKind, byte: u8) -> Buffer {
    let buffer = ipc.allocate_for(0, bytes, kind).unwrap();
    fill(ipc, buffer.range(), byte);
    buffer
}

fn fill(ipc: &Ipc, range: DeviceRange, byte: u8) {
    let (backend, stream) = (ipc.backend(), ipc.backend().memory().create_stream(range.device).unwrap());
    // SAFETY: the range is ours, and the work has finished before others read it.
    unsafe { backend.memory().fill(range, byte, stream.as_borrowed()).unwrap() };
    backend.memory().synchronize(stream.as_borrowed()).unwrap();
}

fn read(ipc: &Ipc, range: DeviceRange) -> Vec<u8> {
    let (backend, stream) = (ipc.backend(), ipc.backend().memory().create_stream(range.device).unwrap());
    let mut bytes = vec![0; range.len as usize];
    // SAFETY: the range is ours, and others have finished with it.
    unsafe { backend.memory().read(range, &mut bytes, stream.as_borrowed()).unwrap() };
    bytes
}

fn free_bytes(backend: &CudaBackend) -> u64 {
    backend.memory().memory_info(ZERO).unwrap().free_bytes
}

/// Shares memory that stays allocated as long as the owner.
fn share_owned<O: Send + 'static>(ipc: &Ipc, owner: O, range: DeviceRange) -> Result<Export, String> {
    // SAFETY: the owner keeps it mapped.
    let owned = unsafe { OwnedRegion::new(owner, Region::new(NAME, range)) };
    ipc.share(owned).start().map_err(|error| error.to_string())
}

#[test]
fn every_kind_is_shared_by_the_same_calls_and_freed() {
    let Some((backend, _alone)) = backend() else { return };
    let ipc = Ipc::with_backend(backend.clone());
    for kind in kinds_here(&backend) {
        let mut other = other_process();
        // The first round of a kind makes the driver reserve memory permanently, in both processes.
        let first = share_twice(&backend, &ipc, &mut other, kind);
        let second = share_twice(&backend, &ipc, &mut other, kind);
        // More, if memory of an earlier test was freed meanwhile.
        assert!(second >= first, "{kind:?}: {second} bytes are free, but {first} were before");
    }
}

/// Shares memory and makes the other process read, change and close it, twice. Returns the bytes that are free
/// afterwards.
fn share_twice(backend: &CudaBackend, ipc: &Ipc, other: &mut Process, kind: HandleKind) -> u64 {
    let buffer = Arc::new(filled(ipc, BYTES, kind, 1));
    let range = buffer.range();
    assert_eq!(range.len, BYTES);
    let extent = backend.extents_of(range, None).unwrap()[0];
    assert_eq!(backend.export(&extent, None).unwrap().kind, kind);
    let export = share_owned(ipc, buffer, range).unwrap();
    assert_eq!(other.ask(&format!("open {}", export.descriptor())), "opened 0", "{kind:?}");
    assert_eq!(other.ask("bytes-are 0 1"), "true", "{kind:?}");
    assert_eq!(other.ask(&format!("fill 0 0 {BYTES} 2")), "filled");
    assert!(read(ipc, range).iter().all(|byte| *byte == 2), "{kind:?}");
    assert_eq!(other.ask("close 0"), "closed");
    // The driver keeps descriptors of open memory: of a pool, until all of it is closed.
    let descriptors = other.ask("descriptors");
    assert_eq!(other.ask(&format!("open {}", export.descriptor())), "opened 0", "{kind:?}");
    assert_eq!(other.ask("bytes-are 0 2"), "true", "{kind:?}");
    assert_eq!(other.ask("close 0"), "closed");
    assert_eq!(other.ask("descriptors"), descriptors, "{kind:?}");
    export.wait_released(SOON).unwrap();
    export.close(SOON).unwrap();
    free_bytes(backend)
}

#[test]
fn mapping_outlives_killed_exporter_until_close() {
    let Some((backend, _alone)) = backend() else { return };
    let ipc = Ipc::with_backend(backend.clone());
    for kind in kinds_here(&backend) {
        let mut other = other_process();
        let descriptor: Descriptor = other.ask(&format!("share {} {BYTES} 5", kind.0)).parse().unwrap();
        let mapping = ipc.open(&descriptor).at_home().unwrap();
        other.kill();
        assert!(read(&ipc, mapping.range()).iter().all(|byte| *byte == 5), "{kind:?}");
        // SAFETY: no work on the memory is submitted any longer.
        assert_eq!(unsafe { close_mappings_of(descriptor.exporter()) }.unwrap(), 1, "{kind:?}");
    }
}

#[test]
fn region_over_several_blocks_opens_as_one_range() {
    let Some((backend, _alone)) = backend() else { return };
    if !has(&backend, VIRTUAL_MEMORY) {
        return;
    }
    let ipc = Ipc::with_backend(backend.clone());
    let sizes = [GRANULE, 2 * GRANULE, GRANULE];
    let blocks = Blocks::map(&backend, &sizes.map(|size| (size, Some(BY_FD))));
    let whole = blocks.range();
    let mut at = 0;
    for (index, size) in sizes.into_iter().enumerate() {
        fill(&ipc, whole.slice(at, size).unwrap(), index as u8 + 1);
        at += size;
    }
    let extents = backend.extents_of(whole, None).unwrap();
    assert_eq!(extents.iter().map(|extent| extent.allocation.len).collect::<Vec<_>>(), sizes);
    let numbers: HashSet<_> = extents.iter().map(|extent| extent.generation).collect();
    assert_eq!(numbers.len(), 3, "each block has a number of its own");

    // From the middle of the first block to the middle of the last.
    let region = whole.slice(GRANULE / 2, 3 * GRANULE).unwrap();
    let export = share_owned(&ipc, blocks, region).unwrap();
    let mut other = other_process();
    assert_eq!(other.ask(&format!("open {}", export.descriptor())), "opened 0");
    for (offset, byte) in [
        (0, 1),
        (GRANULE / 2 - 1, 1),
        (GRANULE / 2, 2),
        (5 * GRANULE / 2 - 1, 2),
        (5 * GRANULE / 2, 3),
        (3 * GRANULE - 1, 3),
    ] {
        assert_eq!(other.ask(&format!("byte 0 {offset}")), byte.to_string(), "at {offset}");
    }
    // Across a seam.
    assert_eq!(other.ask(&format!("fill 0 {} 8 9", GRANULE / 2 - 4)), "filled");
    assert_eq!(read(&ipc, region.slice(GRANULE / 2 - 5, 10).unwrap()), [1, 9, 9, 9, 9, 9, 9, 9, 9, 2]);
    assert_eq!(other.ask("close 0"), "closed");
    export.close(SOON).unwrap();
}

#[test]
fn region_with_hole_or_unshareable_block_is_rejected() {
    let Some((backend, _alone)) = backend() else { return };
    if !has(&backend, VIRTUAL_MEMORY) {
        return;
    }
    let blocks = Blocks::map(&backend, &[(GRANULE, Some(BY_FD)), (GRANULE, None), (GRANULE, Some(BY_FD))]);
    let whole = blocks.range();
    let error = backend.extents_of(whole, None).unwrap_err();
    let hole = after_first_block(whole);
    assert!(matches!(error, Error::InvalidRegion(_)), "{error}");
    assert!(error.to_string().contains(&format!("no memory is mapped at {hole}")), "{error}");
    assert_eq!(backend.extents_of(whole.slice(0, GRANULE).unwrap(), None).unwrap().len(), 1);
    assert!(backend.extents_of(whole.slice(0, GRANULE + 1).unwrap(), None).is_err());
    drop(blocks);

    let blocks = Blocks::map(&backend, &[(GRANULE, Some(BY_FD)), (GRANULE, Some(NO_HANDLE))]);
    let error = backend.extents_of(blocks.range(), None).unwrap_err();
    let Error::NotShareable { ptr, kind, remedy } = &error else { panic!("{error}") };
    assert_eq!(*ptr, after_first_block(blocks.range()));
    assert!(kind.contains("cuMemCreate"), "{error}");
    assert!(remedy.contains("requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"), "{error}");
    eprintln!("{error}");
}

fn after_first_block(range: DeviceRange) -> DevicePtr {
    DevicePtr::new(range.ptr.get() + GRANULE)
}

#[test]
fn read_only_mapping_is_protected_by_the_hardware() {
    let Some((backend, _alone)) = backend() else { return };
    let ipc = Ipc::with_backend(backend.clone());
    for kind in kinds_here(&backend) {
        let buffer = Arc::new(filled(&ipc, BYTES, kind, 3));
        let range = buffer.range();
        let export = share_owned(&ipc, buffer, range).unwrap();
        // A separate process: the kernel's write destroys its context.
        let mut other = other_process();
        let opened = other.ask(&format!("open-read-only {}", export.descriptor()));
        let read_only = backend.handle_kinds().iter().any(|info| info.kind == kind && info.read_only);
        if !read_only {
            let name = name_of(&backend, kind);
            assert!(opened.contains(name) && opened.contains("2 (virtual-memory)"), "{opened}");
            continue;
        }
        assert_eq!(opened, "opened 0");
        assert_eq!(other.ask("bytes-are 0 3"), "true");
        let refused = other.ask("fill 0 0 16 9");
        assert!(refused.contains("CUDA_ERROR_INVALID_VALUE"), "the driver's own write: {refused}");
        let failed = other.ask("add 0 0");
        assert!(failed.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "a kernel's write: {failed}");
        drop(other);
        assert!(read(&ipc, range).iter().all(|byte| *byte == 3), "{kind:?}");
        // The same memory is writable when opened read-write.
        let mut other = other_process();
        assert_eq!(other.ask(&format!("open {}", export.descriptor())), "opened 0");
        assert_eq!(other.ask("fill 0 0 16 9"), "filled");
        assert_eq!(read(&ipc, range.slice(0, 17).unwrap()), [[9; 16].as_slice(), &[3]].concat());
    }
}

#[test]
fn small_block_exposes_neighbours_and_strict_policy_rejects() {
    let Some((backend, _alone)) = backend() else { return };
    let ipc = Ipc::with_backend(backend.clone());
    // Neighbours in a page: the driver allocates several blocks from a page.
    let blocks: Vec<_> = (0..8).map(|_| Arc::new(filled(&ipc, 4096, LEGACY, 0))).collect();
    let page = |buffer: &Buffer| buffer.range().ptr.get() / GRANULE;
    let pairs = || blocks.iter().flat_map(|one| blocks.iter().map(move |two| (one, two)));
    let Some((mine, neighbour)) =
        pairs().find(|(one, two)| one.range().ptr != two.range().ptr && page(one) == page(two))
    else {
        panic!("eight blocks of 4 KiB lie in eight pages; the test proves nothing")
    };
    let distance = neighbour.range().ptr.get() as i64 - mine.range().ptr.get() as i64;
    let export = share_owned(&ipc, Arc::clone(mine), mine.range()).unwrap();
    let exposure = export.exposure();
    assert_eq!((exposure.region_bytes, exposure.reachable_bytes), (4096, Some(GRANULE)));

    let mut other = other_process();
    assert_eq!(other.ask(&format!("open {}", export.descriptor())), "opened 0");
    assert_eq!(
        other.ask(&format!("add 0 {distance}")),
        "added",
        "the neighbour is out of reach; nothing is shown"
    );
    let changed = read(&ipc, neighbour.range().slice(0, 4).unwrap());
    assert_eq!(changed, 1f32.to_ne_bytes(), "the importer's kernel has changed memory that was not shared");

    // SAFETY: the buffer is the owner.
    let owned = unsafe { OwnedRegion::new(Arc::clone(mine), Region::new(NAME, mine.range())) };
    let error = ipc.share(owned).exposure(ExposurePolicy::Refuse).start().unwrap_err();
    assert!(matches!(error.error(), Error::Exposes { .. }), "{error}");

    if !has(&backend, VIRTUAL_MEMORY) {
        return;
    }
    let first = Arc::new(filled(&ipc, 4096, VIRTUAL_MEMORY, 0));
    let second = filled(&ipc, 4096, VIRTUAL_MEMORY, 0);
    let extent = backend.extents_of(first.range(), None).unwrap()[0];
    let exported = backend.export(&extent, None).unwrap();
    assert_eq!(backend.reach(&exported), Some(extent.allocation));
    assert!(!extent.allocation.contains(&second.range()));
    let region = Region::new(NAME, first.range()).with_allocation(first.range());
    // SAFETY: the buffer is the owner.
    let owned = unsafe { OwnedRegion::new(first, region) };
    let export = ipc.share(owned).exposure(ExposurePolicy::Refuse).start().unwrap();
    let mut other = other_process();
    assert_eq!(other.ask(&format!("open {}", export.descriptor())), "opened 0");
    // The importer's address space has no memory of this process there.
    let behind = other.ask(&format!("add 0 {GRANULE}"));
    let expected = behind == "added" || behind.contains("CUDA_ERROR_ILLEGAL_ADDRESS");
    assert!(expected, "behind the block: {behind}");
    assert_eq!(
        read(&ipc, second.range().slice(0, 4).unwrap()),
        [0; 4],
        "memory that was not shared has changed"
    );
    drop(other);
    assert!(read(&ipc, second.range()).iter().all(|byte| *byte == 0));
}

#[test]
fn cudarc_slice_is_shareable_after_make_pool_shareable() {
    let Some((backend, _alone)) = backend() else { return };
    if !has(&backend, POOL) {
        return;
    }
    // SAFETY: only looks up the loaded library.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        eprintln!("skipped: cudarc finds no libcuda.so; set LD_LIBRARY_PATH");
        return;
    }
    let ipc = Ipc::with_backend(backend.clone());
    // The pool is process-wide, so a separate process shares.
    let mut other = other_process();
    let refused = other.ask("allocate-by-cudarc");
    assert!(refused.contains("a pool") && refused.contains("make_pool_shareable(device)"), "{refused}");
    assert_eq!(other.ask("make-pool-shareable"), "made");
    assert_eq!(other.ask("make-pool-shareable"), "made", "a second time changes nothing");
    let first: Descriptor = other.ask("allocate-by-cudarc").parse().unwrap();
    let second: Descriptor = other.ask("allocate-by-cudarc").parse().unwrap();
    let (first, second) = (ipc.open(&first).at_home().unwrap(), ipc.open(&second).at_home().unwrap());
    assert_eq!(read(&ipc, first.range()), [7; 5000]);
    // The pool stays open while one of its slices is open.
    drop(first);
    close_unused(SOON).unwrap();
    assert_eq!(read(&ipc, second.range()), [7; 5000]);
    fill(&ipc, second.range(), 8);
    assert_eq!(read(&ipc, second.range()), [8; 5000]);
    drop(second);
    close_unused(SOON).unwrap();
    let again: Descriptor = other.ask("allocate-by-cudarc").parse().unwrap();
    assert_eq!(read(&ipc, ipc.open(&again).at_home().unwrap().range()), [7; 5000]);
    close_unused(SOON).unwrap();
}

#[test]
fn corrupt_handle_is_rejected_without_leaks() {
    let Some((backend, _alone)) = backend() else { return };
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let file = || vec![std::fs::File::open("/dev/null").unwrap().into()];
    let received = |kind, bytes: Vec<u8>, fds, size| ReceivedHandle {
        kind,
        bytes: HandleBytes::new(bytes),
        fds,
        size,
        generation: None,
        home_identity: None,
        home: Some(ZERO),
        exporter: ProcessIdentity::current().unwrap(),
    };
    let open = |handles| backend.open(handles, ZERO, Access::ReadWrite).map(|_| ()).unwrap_err();
    let pool_bytes = |byte: u8| [[1].as_slice(), &[byte; 80]].concat();
    // The driver's own resources for such handles exist from the first round on.
    let mut before = None;
    for round in 0..3 {
        for kind in backend.handle_kinds() {
            for len in [0, 1, 63, 64, 65, 80, 81, 82, 4096] {
                for fds in [Vec::new(), file(), [file(), file()].into_iter().flatten().collect()] {
                    for size in [0, 1, 4096, GRANULE, u64::MAX] {
                        let fds = fds.iter().map(|fd: &OwnedFd| fd.try_clone().unwrap()).collect();
                        let error = open(vec![received(kind.kind, vec![7; len], fds, size)]);
                        assert!(!error.to_string().is_empty());
                    }
                }
            }
        }
        for byte in [0, 7, 0xff] {
            open(vec![received(POOL, pool_bytes(byte), file(), 4096)]);
        }
        let error = open(vec![
            received(VIRTUAL_MEMORY, Vec::new(), file(), GRANULE),
            received(LEGACY, vec![7; 64], Vec::new(), GRANULE),
        ]);
        assert!(error.to_string().contains("kinds 2 (virtual-memory) and 1 (legacy)"), "{error}");
        let now = descriptors();
        // Fewer, if descriptors of an earlier test were closed meanwhile.
        let leaked = before.is_some_and(|before| now > before);
        assert!(!leaked, "round {round}: {now} descriptors, {before:?} before");
        before = Some(now);
    }
}

#[test]
fn fabric_support_matches_allocation_or_names_the_cause() {
    let Some((backend, _alone)) = backend() else { return };
    let found = backend.fabric(0).unwrap();
    eprintln!("{found}");
    assert_eq!(backend.fabric(0).unwrap(), found, "the answer is remembered");
    match (&found, backend.memory().allocate_as(ZERO, 1, FABRIC)) {
        // SAFETY: freed once.
        (FabricSupport::Available, Ok(range)) => unsafe { backend.memory().free(range) }.unwrap(),
        (FabricSupport::Available, Err(error)) => panic!("{error}"),
        (_, Ok(range)) => panic!("{found}, but the allocation succeeded: {range:?}"),
        (_, Err(error)) => assert!(error.to_string().contains(&found.to_string()), "{error}"),
    }
    assert!(matches!(backend.fabric(99), Err(Error::NoSuchDevice { .. })));
}

#[test]
fn requested_kind_is_exported_or_rejected_by_name() {
    let Some((backend, _alone)) = backend() else { return };
    let kinds = kinds_here(&backend);
    for allocated in &kinds {
        let range = backend.memory().allocate_as(ZERO, 1000, *allocated).unwrap();
        let extent = backend.extents_of(range, None).unwrap()[0];
        for stated in &kinds {
            let exported = backend.export(&extent, Some(*stated));
            if stated == allocated {
                backend.unexport(exported.unwrap()).unwrap();
                continue;
            }
            let error = exported.unwrap_err();
            let expected = format!("no handle of kind {} ({})", stated.0, name_of(&backend, *stated));
            assert!(error.to_string().contains(&expected), "{error}");
        }
        // SAFETY: freed once.
        unsafe { backend.memory().free(range) }.unwrap();
    }
    let error = backend.memory().allocate_as(ZERO, 1000, HandleKind(77)).unwrap_err();
    assert!(error.to_string().contains("kind 77"), "{error}");
}

#[test]
#[ignore = "the child of the other tests"]
fn the_other_process() {
    child::run();
}
