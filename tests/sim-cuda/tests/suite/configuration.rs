//! The configuration of the simulator by the environment: machine, driver, faults, missing functions.

use std::time::Duration;

use super::support::Installed;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory};
use device_ipc_core::{DeviceIdentity, DeviceOrdinal, DevicePtr, DeviceRange, Error};
use device_ipc_cuda::{CudaBackend, FABRIC, FabricSupport, LEGACY, POOL, VIRTUAL_MEMORY};
use device_ipc_test_process::{command_of_test, output_of};

const LIMIT: Duration = Duration::from_secs(60);

/// Runs the probes with this in their names, and returns the output.
fn probes(installed: &Installed, machine: &str, only: &str) -> String {
    let mut command = installed.command(env!("CARGO_BIN_EXE_cuda-probes"), machine);
    command.arg(installed.library()).args(["--only", only]);
    let (success, text) = output_of(command, LIMIT);
    assert!(success, "{text}");
    text
}

/// Returns the version and the ordered names of the devices that the backend reports, in a separate process.
fn seen(machine: &str, visible: Option<&str>) -> String {
    let installed = Installed::new();
    let mut command = installed.prepare(command_of_test(concat!(module_path!(), "::the_backend")), machine);
    if let Some(visible) = visible {
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    let (_, text) = output_of(command, LIMIT);
    let said = text.lines().find_map(|line| line.split_once("SEES ").map(|(_, said)| said.to_owned()));
    said.unwrap_or_else(|| panic!("{text}"))
}

#[test]
#[ignore = "the child of other tests"]
fn the_backend() {
    let backend = match CudaBackend::load() {
        Ok(backend) => backend,
        Err(reason) => return println!("\nSEES nothing: {reason}"),
    };
    let devices = backend.devices().expect("they are listed");
    let names: Vec<String> = devices
        .iter()
        .map(|device| match &device.identity {
            DeviceIdentity::Uuid(uuid) => format!("{} {:02x}", device.name, uuid[3]),
            other => format!("{} {other:?}", device.name),
        })
        .collect();
    println!("\nSEES {}: {}", backend.info().version, names.join(", "));
}

#[test]
fn configured_version_is_reported() {
    // On a machine with the kernel's driver, its version comes first.
    assert!(seen("", None).contains("CUDA 13.0: "));
    assert!(seen("driver=12020", None).contains("CUDA 12.2: "));
    assert!(seen("driver=11000", None).contains("too old") || seen("driver=11000", None).contains("11.4"));
}

#[test]
fn visible_devices_are_ordered_by_variable() {
    let names = |visible| {
        let said = seen("devices=3", Some(visible));
        said.split_once(": ").map(|(_, names)| names.to_owned()).expect("names")
    };
    let [zero, one, two] = ["Simulated GPU 0 da", "Simulated GPU 1 db", "Simulated GPU 2 dc"];
    assert_eq!(names("2,0"), format!("{two}, {zero}"));
    assert_eq!(names("GPU-5151c0db,2"), format!("{one}, {two}"));
    assert_eq!(names("1,9,0"), one);
    assert!(seen("devices=3", Some("")).contains("CUDA_ERROR_NO_DEVICE (100)"));
    assert!(seen("devices=0", None).contains("CUDA_ERROR_NO_DEVICE (100)"));
}

#[test]
fn fault_returns_any_status() {
    let installed = Installed::new();
    let one = |machine: &str, only: &str| probes(&installed, machine, only).trim().to_owned();
    let reads = "opening::reads_and_is_read: ";
    assert_eq!(
        one("fault=cuIpcOpenMemHandle:1:4242", reads.trim_end_matches(": ")),
        format!("{reads}status 4242")
    );
    // Only the second call.
    let twice = "opening::twice_in_one_context";
    assert_eq!(one("fault=cuIpcOpenMemHandle_v2:2:304", twice), format!("{twice}: OPERATING_SYSTEM (304)"));
    let ok = format!("{twice}: the same address: yes");
    assert_eq!(one("fault=cuIpcOpenMemHandle:3:304", twice), ok);
    assert_eq!(one("", twice), ok);
}

#[test]
fn invalid_description_fails_initialization() {
    let said = seen("devices=many", None);
    assert!(said.contains("CUDA_ERROR_UNKNOWN (999)"), "{said}");
    let installed = Installed::new();
    let text = probes(&installed, "gpus=2", "opening::zeros");
    assert!(text.contains("unknown 'gpus=2'") && text.contains("known are devices"), "{text}");
}

#[test]
fn older_driver_lacks_functions() {
    let older = Installed::without(&["cuIpcOpenMemHandle_v2", "cuMemAlloc_v2"]);
    let text = probes(&older, "", "context::address_of_a_function");
    assert!(text.contains("an address: no, found: 1"), "{text}");
    let text = probes(&older, "", "opening::zeros");
    assert!(text.contains("no cuIpcOpenMemHandle_v2"), "{text}");
    let error = CudaBackend::load_from(older.library()).expect_err("a function that is needed is missing");
    assert!(error.to_string().contains("cuMemAlloc_v2"), "{error}");
}

#[test]
fn fabric_handles_require_imex_channel() {
    let installed = Installed::new();
    let with = probes(&installed, "imex", "virtual_memory::fabric");
    assert!(
        with.contains("fabric: success") && with.contains("fabric_of_another_process: reads 7"),
        "{with}"
    );
    let without = probes(&installed, "", "virtual_memory::fabric_of_another_process");
    assert!(without.contains("NOT_PERMITTED (800)"), "{without}");
}

#[test]
fn devices_without_peer_access_reject_enable() {
    let installed = Installed::new();
    let text = probes(&installed, "devices=2;peers=none", "opening::on_another_device");
    assert!(text.contains("PEER_ACCESS_UNSUPPORTED (217)"), "{text}");
    let text = probes(&installed, "devices=2;peers=none", "context::peer_memory_with_access");
    assert!(
        text.contains("enable: PEER_ACCESS_UNSUPPORTED (217)") && text.contains("copy: success"),
        "{text}"
    );
}

#[test]
fn killed_processes_leave_dev_shm_empty() {
    let ours = || {
        let names = std::fs::read_dir("/dev/shm").expect("/dev/shm is readable").flatten();
        names.filter(|entry| entry.file_name().to_string_lossy().contains("sim-cuda")).count()
    };
    let installed = Installed::new();
    let text = probes(&installed, "", "the_exporters_death");
    assert!(text.lines().count() >= 4 && text.contains("reads 7"), "{text}");
    assert_eq!(ours(), 0);
}

#[test]
fn old_driver_has_legacy_handles_only() {
    let lacking = ["cuMemMap", "cuMemPoolImportPointer", "cuPointerGetAttributes"];
    let installed = Installed::without(&lacking);
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
