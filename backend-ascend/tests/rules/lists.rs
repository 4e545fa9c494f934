//! The driver's list of importers for each handle.

use std::process::{Child, Command};

use device_ipc_ascend::{KEY, LoadOptions, PidValidation, SHAREABLE};
use device_ipc_core::Error;
use device_ipc_core::backend::{DeviceIpc, VendorStatus};
use device_ipc_test_process::unhex;

use super::importer::{IMPORTER, close_and_unexport, encode};
use super::memory::{HUGE, ZERO, backend, extent_of, memory, share, status_of};
use super::support::{Raw, scene};

#[test]
fn each_importer_is_listed_once() {
    scene!("devices=1").play(IMPORTER, |scene| {
        let (backend, raw) = (backend(), Raw::open());
        for (kind, call) in [(KEY, "aclrtIpcMemSetImportPid"), (SHAREABLE, "aclrtMemSetPidToShareableHandle")]
        {
            let exported = share(&backend, ZERO, HUGE, kind);
            assert_eq!(exported.kind, kind);
            let mut peer = scene.peer("importer");
            let id = unhex(&peer.ask("id"));
            let refused = peer.ask(&format!("open {} 0 0", encode(&exported)));
            assert!(refused.starts_with("err "), "an importer that is not listed: {refused}");
            for _ in 0..3 {
                backend.authorize(&exported, &id).expect("the importer is listed");
            }
            assert_eq!(raw.calls(call), 1, "a process is listed once");
            let opened = peer.ask(&format!("open {} 0 0", encode(&exported)));
            assert!(opened.starts_with("ok "), "{opened}");
            close_and_unexport(&backend, exported, peer);
        }
    });
}

#[test]
fn listing_is_split_into_chunks_of_31() {
    scene!("devices=1").play(&[], |_| {
        /// Idle processes, killed at the end of the test.
        struct Idle(Vec<Child>);
        impl Drop for Idle {
            fn drop(&mut self) {
                for child in &mut self.0 {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
        }
        let idle = || Command::new("sleep").arg("60").spawn().expect("sleep is installed");
        let idle = Idle((0..64).map(|_| idle()).collect());
        let peers: Vec<u8> = idle.0.iter().flat_map(|child| (child.id() as i32).to_le_bytes()).collect();
        let (backend, raw) = (backend(), Raw::open());
        let exported = share(&backend, ZERO, HUGE, KEY);
        backend.authorize(&exported, &peers).expect("all are listed");
        assert_eq!(raw.calls("aclrtIpcMemSetImportPid"), 3, "31, 31 and 2");
    });
}

#[test]
fn importer_with_the_exporters_id_is_rejected() {
    scene!("devices=1").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        let exported = share(&backend, ZERO, HUGE, KEY);
        let own = backend.local_peer_id(ZERO).expect("an id");
        let error = backend.authorize(&exported, &own).unwrap_err();
        assert!(matches!(error, Error::NotPermitted(_)), "{error:?}");
        for bad in [&[][..], &[0; 4], &[0xff; 4], &[1, 2, 3]] {
            let error = backend.authorize(&exported, bad).unwrap_err();
            assert!(matches!(error, Error::Protocol(_)), "{bad:?}: {error:?}");
        }
        assert_eq!(raw.calls("aclrtIpcMemSetImportPid"), 0, "none of these reaches the driver");
    });
}

#[test]
fn pid_validation_off_admits_unlisted_importers() {
    const OFF: &[(&str, &str)] = &[("DEVICE_IPC_ASCEND_PID_VALIDATION", "off")];
    scene!("devices=1").environment(OFF).play(IMPORTER, |scene| {
        let (backend, raw) = (backend(), Raw::open());
        assert!(backend.handle_kinds().iter().all(|kind| !kind.whitelist));
        let listed = LoadOptions::new().pid_validation(PidValidation::On).load().expect("a backend");
        assert!(listed.handle_kinds().iter().all(|kind| kind.whitelist), "the option goes before");
        for kind in [KEY, SHAREABLE] {
            let exported = share(&backend, ZERO, HUGE, kind);
            let mut peer = scene.peer("importer");
            let opened = peer.ask(&format!("open {} 0 0", encode(&exported)));
            assert!(opened.starts_with("ok "), "no process is listed: {opened}");
            backend.authorize(&exported, &unhex(&peer.ask("id"))).expect("there is nothing to do");
            close_and_unexport(&backend, exported, peer);
        }
        assert_eq!(raw.calls("aclrtIpcMemSetImportPid"), 0, "there is no list to fill");
        assert_eq!(raw.calls("aclrtMemSetPidToShareableHandle"), 0, "there is no list to fill");
    });
}

#[test]
fn driver_without_validation_off_is_explained() {
    scene!("devices=1;old-driver").play(&[], |_| {
        let backend = LoadOptions::new().pid_validation(PidValidation::Off).load().expect("a backend");
        let range = memory(&backend, ZERO, HUGE, KEY);
        let (status, text) = status_of(backend.export(&extent_of(&backend, range), None));
        assert_eq!(status, VendorStatus(207_000));
        assert!(text.contains("25.3.RC1") && text.contains("PID_VALIDATION=on"), "{text}");
    });
}
