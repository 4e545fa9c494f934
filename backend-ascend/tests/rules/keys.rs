//! Keys: their format, and how often the backend opens and closes one.

use device_ipc_ascend::KEY;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, Exported};

use super::importer::{IMPORTER, close_and_unexport, encode, open_expecting_success, open_listed};
use super::memory::{HUGE, ZERO, backend, extent_of, memory};
use super::support::{Raw, scene};

#[test]
fn key_is_65_bytes_of_any_value() {
    for machine in ["soc=910b;devices=1", "soc=950;devices=1"] {
        scene!(machine).play(IMPORTER, |scene| {
            let backend = backend();
            let range = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, range), Some(KEY)).expect("a key");
            let key = &exported.bytes.as_slice()[..65];
            let len = key.iter().position(|byte| *byte == 0).expect("a key ends");
            assert!(len > 0, "a key is not empty");
            if backend.devices().expect("devices")[0].name.contains("950") {
                assert!(!key[..len].is_ascii(), "the driver of 950 makes keys of any bytes");
            }
            let mut peer = scene.peer("importer");
            open_expecting_success(&backend, &exported, &mut peer, 0);
            assert_eq!(peer.ask("whole"), "true");
            close_and_unexport(&backend, exported, peer);
        });
    }
}

#[test]
fn key_is_imported_once_and_closed_once() {
    scene!("devices=1").play(IMPORTER, |scene| {
        let (backend, raw) = (backend(), Raw::open());
        let range = memory(&backend, ZERO, HUGE, KEY);
        let exported = backend.export(&extent_of(&backend, range), None).expect("a key");
        let mut peer = scene.peer("importer");
        let first = open_listed(&backend, &exported, &mut peer, 0);
        let second = peer.ask(&format!("open {} 0 0", encode(&exported)));
        assert!(first.starts_with("ok ") && first == second, "{first} {second}");
        assert_eq!(peer.ask("calls aclrtIpcMemImportByKey"), "1");
        assert_eq!(peer.ask("close"), "ok ");
        assert_eq!(peer.ask("calls aclrtIpcMemClose"), "0", "the other one is still open");
        assert_eq!(peer.ask("whole"), "true");
        assert_eq!(peer.ask("close"), "ok ");
        assert_eq!(peer.ask("calls aclrtIpcMemClose"), "1");
        // The key can be opened again.
        assert!(peer.ask(&format!("open {} 0 0", encode(&exported))).starts_with("ok "));
        assert_eq!(peer.ask("close"), "ok ");
        peer.finish();
        // Importers first, then the exporter, once.
        let again = Exported { bytes: exported.bytes.clone(), fds: Vec::new(), ..exported };
        backend
            .unexport(Exported { bytes: again.bytes.clone(), fds: Vec::new(), ..again })
            .expect("it goes back");
        assert!(
            backend.unexport(again).is_err(),
            "a second close would attempt to destroy the exporter's key"
        );
        assert_eq!(raw.calls("aclrtIpcMemClose"), 1);
        // SAFETY: no longer used.
        unsafe { backend.free(range) }.expect("it can be freed");
    });
}

#[test]
fn keys_of_one_block_are_destroyed_in_creation_order() {
    scene!("devices=2").play(IMPORTER, |scene| {
        let (backend, raw) = (backend(), Raw::open());
        let range = memory(&backend, ZERO, HUGE, KEY);
        let extent = extent_of(&backend, range);
        let [first, second, third] = [(); 3].map(|()| backend.export(&extent, None).expect("a key"));
        let mut peer = scene.peer("importer");
        open_expecting_success(&backend, &first, &mut peer, 0);
        open_expecting_success(&backend, &third, &mut peer, 1);
        // The driver records keys by address: destroying one key earlier would leave importers of the others with
        // freed memory.
        backend.unexport(second).expect("it goes back");
        assert_eq!(raw.calls("aclrtIpcMemClose"), 0, "other keys of the block are in use");
        assert_eq!(peer.ask("close"), "ok ");
        backend.unexport(third).expect("it goes back");
        assert_eq!(peer.ask("whole"), "true");
        assert_eq!(peer.ask("close"), "ok ");
        peer.finish();
        backend.unexport(first).expect("it goes back");
        assert_eq!(raw.calls("aclrtIpcMemClose"), 3);
        // Keys that were not unexported are destroyed before their memory is freed.
        let left = [(); 2].map(|()| backend.export(&extent, None).expect("a key"));
        // SAFETY: no longer used.
        unsafe { backend.free(range) }.expect("it can be freed");
        assert_eq!(raw.calls("aclrtIpcMemClose"), 5);
        assert!(left.into_iter().all(|exported| backend.unexport(exported).is_err()));
    });
}

#[test]
fn second_device_of_a_process_requires_another_key() {
    scene!("devices=2").play(IMPORTER, |scene| {
        let backend = backend();
        assert!(backend.handle_kinds()[0].one_open_per_process);
        let range = memory(&backend, ZERO, HUGE, KEY);
        let extent = extent_of(&backend, range);
        let [first, further] = [(); 2].map(|()| backend.export(&extent, None).expect("a key"));
        assert_ne!(first.bytes, further.bytes, "an allocation can have several keys");
        let mut peer = scene.peer("importer");
        open_expecting_success(&backend, &first, &mut peer, 0);
        let refused = peer.ask(&format!("open {} 0 1", encode(&first)));
        assert!(refused.contains("Unsupported") && refused.contains("another key"), "{refused}");
        assert_eq!(peer.ask("calls aclrtIpcMemImportByKey"), "1", "the driver was not asked");
        open_expecting_success(&backend, &further, &mut peer, 1);
        assert_eq!(peer.ask("whole"), "true");
        assert_eq!(peer.ask("close"), "ok ");
        assert_eq!(peer.ask("close"), "ok ");
        peer.finish();
        for exported in [first, further] {
            backend.unexport(exported).expect("it goes back");
        }
    });
}
