//! The tests of the CUDA backend for every kind of memory, on the simulator, and on a driver with one kind only.

mod support;

use device_ipc_core::backend::{DeviceIpc, DeviceMemory};
use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Error};
use device_ipc_cuda::{CudaBackend, FABRIC, FabricSupport, LEGACY, POOL, VIRTUAL_MEMORY};

#[path = "../../../backend-cuda/tests/kinds/main.rs"]
mod backend;

#[test]
fn pass_on_the_simulator() {
    support::run_tests("backend", "devices=2;memory=4GiB;imex");
}

#[test]
#[ignore = "the child of another test"]
fn the_other_process() {
    support::become_test("backend::the_other_process");
}

#[test]
fn old_driver_has_legacy_handles_only() {
    let lacking = ["cuMemMap", "cuMemPoolImportPointer", "cuPointerGetAttributes"];
    let installed = support::Installed::without(&lacking);
    let backend = CudaBackend::load_from(installed.library()).expect("legacy handles need none of them");
    let device = DeviceOrdinal::new(0);
    let kinds: Vec<_> = backend.handle_kinds().iter().map(|info| info.kind).collect();
    assert_eq!(kinds, [LEGACY]);

    let range = backend.allocate(device, 10_000).expect("memory");
    let extent = backend.extents_of(range, None).expect("attributes are asked one by one")[0];
    assert_eq!(extent.allocation, range);
    assert!(extent.generation.is_some());
    assert_eq!(backend.export(&extent, None).expect("a handle").kind, LEGACY);
    let unknown = backend.extents_of(DeviceRange { ptr: HOST, ..range }, None);
    assert!(matches!(unknown, Err(Error::NotDeviceMemory { .. })), "{unknown:?}");

    for kind in [VIRTUAL_MEMORY, POOL, FABRIC] {
        let refused = backend.allocate_as(device, 10_000, kind);
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
    assert!(matches!(backend.fabric(device), Ok(FabricSupport::NotSupported { .. })));
    let refused = backend.make_pool_shareable(device);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    // SAFETY: freed once.
    unsafe { backend.free(range) }.expect("freed");
}

/// An address that no driver knows.
const HOST: DevicePtr = DevicePtr::new(64);
