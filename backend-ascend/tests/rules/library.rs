//! The library: its names, versions and statuses, and other owners of the runtime in the process.

use std::process::Command;

use device_ipc_ascend::{KEY, SHAREABLE};
use device_ipc_core::Error;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, VendorStatus};
use device_ipc_sim_ascendcl::Cann;

use super::importer::{IMPORTER, close_and_unexport, encode, open_expecting_success};
use super::memory::{HUGE, ONE, ZERO, backend, extent_of, memory, status_of};
use super::support::{Raw, has_simulator, library_of, scene};

#[test]
fn other_runtime_owner_survives_backend_drop() {
    scene!("devices=1").play(&[], |_| {
        let raw = Raw::open();
        assert_eq!(raw.call_with_null("aclInit"), 0);
        assert_eq!(raw.call_with("aclrtSetDevice", 0), 0);
        // The second initialisation returns 100002, and the third as well.
        let (first, second) = (backend(), backend());
        let stream = first.create_stream(ZERO).expect("a stream");
        drop(stream);
        drop(first);
        let range = second.allocate(ZERO, 64).expect("the other backend goes on");
        // SAFETY: no longer used.
        unsafe { second.free(range) }.expect("it can be freed");
        drop(second);
        assert_eq!(raw.calls("aclFinalize"), 0, "aclFinalize would end the runtime for everybody");
        assert_eq!(raw.get_int("aclrtGetDevice"), (0, 0), "the other owner's device is still set");
        raw.malloc(4096, 0);
    });
}

#[test]
fn listing_devices_does_not_call_aclinit() {
    scene!("devices=2").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        assert_eq!(backend.devices().expect("devices").len(), 2);
        assert!(backend.peer_access(ONE, ZERO).expect("an answer"));
        assert_eq!(raw.calls("aclInit"), 0);
        let file = std::env::temp_dir().join(format!("device-ipc-acl-{}.json", std::process::id()));
        std::fs::write(&file, "{\"dump\":{}}").expect("a file");
        assert_eq!(raw.init(&file), 0, "the configuration of this owner counts");
        backend.allocate(ZERO, 64).expect("the backend is initialised with the context");
        assert_eq!(raw.calls("aclInit"), 2);
        drop(backend);
        std::fs::remove_file(&file).expect("the file goes");
        assert_eq!(
            raw.call("aclrtSynchronizeDevice"),
            107_002,
            "the runtime goes on; no context is left here"
        );
    });
}

#[test]
fn later_runtime_owner_is_not_rejected() {
    scene!("devices=1").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        backend.synchronize_device(ZERO).expect("a context");
        drop(backend);
        let file = std::env::temp_dir().join(format!("device-ipc-acl-{}.json", std::process::id()));
        std::fs::write(&file, "{}").expect("a file");
        // 100000 if the backend had decremented the count to zero: the configuration differs from the first one.
        assert_eq!(raw.init(&file), 100_002);
        std::fs::remove_file(&file).expect("the file goes");
    });
}

#[test]
fn runtime_requiring_aclinit_first_is_initialised() {
    const FAULT: &str = "devices=1;fault=aclrtGetDeviceCount:1:100001";
    scene!(FAULT).play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        assert_eq!(backend.devices().expect("devices").len(), 1);
        backend.synchronize_device(ZERO).expect("a context");
        assert_eq!((raw.calls("aclrtGetDeviceCount"), raw.calls("aclInit")), (2, 1));
    });
}

#[test]
fn second_library_name_is_found() {
    scene!("devices=1").play(
        &[("loader", || {
            let library = backend().info().library.clone().expect("a library");
            assert!(library.ends_with("/libacl_rt.so"), "{library}");
        })],
        |scene| {
            let directory = std::env::temp_dir().join(format!("device-ipc-acl-rt-{}", std::process::id()));
            std::fs::create_dir_all(&directory).expect("a directory");
            std::fs::copy(library_of(scene.cann), directory.join("libacl_rt.so")).expect("a copy");
            let listed = Command::new(std::env::current_exe().expect("a file"))
                .args(["--exact", scene.name, "--nocapture"])
                .env("LD_LIBRARY_PATH", &directory)
                .env("DEVICE_IPC_ASCEND_ROLE", "loader")
                .env_remove(device_ipc_ascend::LIBRARY_VARIABLE)
                .status();
            std::fs::remove_dir_all(&directory).expect("the directory goes");
            assert!(listed.expect("the process ran").success());
        },
    );
}

#[test]
fn oldest_supported_cann_shares_memory() {
    scene!("soc=910b;devices=2").cann(Cann::V8_3).play(IMPORTER, |scene| {
        let backend = backend();
        let capabilities = backend.capabilities(ZERO).expect("capabilities");
        assert!(!capabilities.ipc_events && !capabilities.timelines, "both came later");
        for kind in backend.handle_kinds() {
            for on in [0, 1] {
                let range = memory(&backend, ZERO, HUGE, kind.kind);
                let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
                let mut peer = scene.peer("importer");
                open_expecting_success(&backend, &exported, &mut peer, on);
                assert_eq!(peer.ask("whole"), "true");
                if kind.kind == SHAREABLE {
                    let opened = peer.ask(&format!("open {} 0 {}", encode(&exported), 1 - on));
                    assert!(opened.starts_with("ok "), "{opened}");
                    assert_eq!(peer.ask("close"), "ok ");
                }
                close_and_unexport(&backend, exported, peer);
            }
        }
    });
}

#[test]
fn unknown_status_is_an_ordinary_error() {
    scene!("devices=1").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        let range = memory(&backend, ZERO, HUGE, KEY);
        let extent = extent_of(&backend, range);
        raw.fail_next("aclrtIpcMemGetExportKey", 4242);
        let (status, text) = status_of(backend.export(&extent, None));
        assert_eq!(status, VendorStatus(4242));
        assert!(text.contains("aclrtIpcMemGetExportKey failed with unknown status (4242)"), "{text}");
        assert!(text.contains("[simulator]"), "the error contains the vendor's message: {text}");
        raw.fail_next("aclrtMallocAlign32", -7);
        assert_eq!(status_of(backend.allocate(ZERO, 1)).0, VendorStatus(-7));
        raw.fail_next("aclrtCreateStream", i32::MAX);
        assert_eq!(status_of(backend.create_stream(ZERO)).0, VendorStatus(i32::MAX));
        for status in [207_001, 207_018, 200_000] {
            raw.fail_next("aclrtMallocAlign32", status);
            let error = backend.allocate(ZERO, 1).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { bytes: 1, .. }), "{error:?}");
        }
    });
}

#[test]
fn simulator_is_available() {
    // Every other test passes without the simulator; this one fails.
    if has_simulator() {
        assert!(library_of(Cann::V9_1).is_file());
    }
}
