//! Memory of another card.

use device_ipc_ascend::{KEY, SHAREABLE};
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, HandleKind};
use device_ipc_core::{Access, DeviceOrdinal, Error};
use device_ipc_test_process::{answer, hex, request, serve, unhex};

use super::importer::{IMPORTER, close_and_unexport, encode, importer, open_expecting_success, received};
use super::memory::{HUGE, ONE, ZERO, backend, extent_of, memory, pattern, read, share};
use super::support::{Raw, Scene, scene};

#[test]
fn key_memory_of_another_card_uses_supported_copies() {
    scene!("soc=910b;devices=2").play(IMPORTER, |scene| copies_across(scene, KEY));
}

#[test]
fn physical_memory_of_another_card_uses_supported_copies() {
    scene!("soc=910b;devices=2").play(IMPORTER, |scene| copies_across(scene, SHAREABLE));
}

fn copies_across(scene: &Scene, kind: HandleKind) {
    let backend = backend();
    // Less than one staging buffer, and more than one.
    for bytes in [HUGE, (64 << 20) + HUGE] {
        let range = memory(&backend, ZERO, bytes, kind);
        let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
        let mut peer = scene.peer("importer");
        open_expecting_success(&backend, &exported, &mut peer, 1);
        let start = hex(&pattern(64));
        assert_eq!(peer.ask("read"), format!("ok {start}"));
        assert_eq!(peer.ask("copy"), format!("ok {start}"));
        assert_eq!(peer.ask("whole"), "true");
        assert_eq!(peer.ask("fill 7"), "ok ");
        let stream = backend.create_stream(ZERO).expect("a stream");
        let seen = read(&backend, range, &*stream).expect("it can be read");
        assert!(seen == vec![7; seen.len()], "all of it is filled");
        assert_eq!(peer.ask("fill 0"), "ok ");
        assert_eq!(peer.ask("add 1.5"), "ok ");
        let seen = read(&backend, range, &*stream).expect("it can be read");
        assert!(seen == 1.5f32.to_ne_bytes().repeat(seen.len() / 4), "1.5 in every float");
        assert_eq!(peer.ask("pattern"), "ok ");
        let seen = read(&backend, range, &*stream).expect("it can be read");
        assert!(seen == pattern(seen.len()), "the bytes written from the other card");
        close_and_unexport(&backend, exported, peer);
        // SAFETY: no longer used.
        unsafe { backend.free(range) }.expect("it can be freed");
    }
}

#[test]
fn failed_key_import_across_cards_suggests_remedies() {
    scene!("devices=2").play(
        &[
            ("importer", importer),
            ("refused", || {
                let (backend, raw) = (backend(), Raw::open());
                answer(hex(&backend.local_peer_id(ZERO).expect("an id")));
                let line = request().expect("a handle");
                let parts: Vec<&str> = line.split(':').collect();
                raw.fail_next("aclrtIpcMemImportByKey", 507_899);
                let handle = received(KEY, unhex(parts[1]), HUGE, Some(ZERO));
                answer(backend.open(vec![handle], ONE, Access::ReadWrite).unwrap_err().to_string());
            }),
        ],
        |scene| {
            let backend = backend();
            let mut peer = scene.peer("refused");
            let key = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, key), None).expect("a key");
            backend.authorize(&exported, &unhex(&peer.receive())).expect("the importer is listed");
            let text = peer.ask(&encode(&exported));
            for phrase in
                ["507899", "[simulator]", "device 0", "device 1", "25.5.2", "at_home", "allocate_as", "plog"]
            {
                assert!(text.contains(phrase), "{phrase:?} is missing in {text}");
            }
            peer.finish();
            // The suggested remedy works.
            let exported = share(&backend, ZERO, HUGE, SHAREABLE);
            let mut peer = scene.peer("importer");
            open_expecting_success(&backend, &exported, &mut peer, 1);
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
        },
    );
}

#[test]
fn unreachable_cards_are_rejected_before_driver_calls() {
    scene!("devices=2;peers=none").play(&[], |_| {
        let (backend, raw) = (backend(), Raw::open());
        for kind in [KEY, SHAREABLE] {
            let bytes = if kind == KEY { [b'a'; 64].into_iter().chain([0]).collect() } else { vec![1; 16] };
            let handle = received(kind, bytes, HUGE, Some(ZERO));
            let error = backend.open(vec![handle], ONE, Access::ReadWrite).unwrap_err();
            assert!(matches!(error, Error::NoPeerAccess { from: ONE, .. }), "{error:?}");
        }
        assert_eq!(raw.calls("aclrtIpcMemImportByKey"), 0);
        assert_eq!(raw.calls("aclrtMemImportFromShareableHandle"), 0);
    });
}

#[test]
fn peer_access_is_enabled_in_both_directions() {
    // Positions 0 and 1 are the physical cards 4 and 5: the status call would take the physical id.
    const VISIBLE: &[(&str, &str)] = &[("ASCEND_RT_VISIBLE_DEVICES", "4,5")];
    scene!("devices=8").environment(VISIBLE).play(IMPORTER, |scene| {
        let (backend, raw) = (backend(), Raw::open());
        for kind in [KEY, SHAREABLE] {
            let exported = share(&backend, ZERO, HUGE, kind);
            let mut peer = scene.peer("importer");
            open_expecting_success(&backend, &exported, &mut peer, 1);
            assert_eq!(peer.ask("whole"), "true", "kind {}", kind.0);
            let enabled = if kind == KEY { "0" } else { "2" };
            assert_eq!(peer.ask("calls aclrtDeviceEnablePeerAccess"), enabled);
            assert_eq!(peer.ask("calls aclrtDevicePeerAccessStatus"), "0");
            close_and_unexport(&backend, exported, peer);
        }
        let source = memory(&backend, ZERO, HUGE, KEY);
        let target = backend.allocate(ONE, HUGE).expect("memory");
        let stream = backend.create_stream(ONE).expect("a stream");
        for _ in 0..2 {
            // SAFETY: both ranges are ours.
            unsafe { backend.copy(target, source, stream.as_borrowed()) }.expect("a copy");
        }
        let seen = read(&backend, target, &*stream).expect("it can be read");
        assert!(seen == pattern(seen.len()));
        assert_eq!(raw.calls("aclrtDeviceEnablePeerAccess"), 2, "each direction once");
    });
}

#[test]
fn dies_of_one_chip_share_without_peer_access() {
    for machine in ["soc=910_93;devices=4", "soc=910_93;devices=4;two-links"] {
        scene!(machine).play(IMPORTER, |scene| {
            let (backend, raw) = (backend(), Raw::open());
            let two_links = scene.machine.contains("two-links");
            assert!(backend.peer_access(ONE, ZERO).expect("an answer"));
            let far = DeviceOrdinal::new(3);
            assert_eq!(backend.peer_access(far, ZERO).expect("an answer"), two_links);
            for kind in [KEY, SHAREABLE] {
                let exported = share(&backend, ZERO, HUGE, kind);
                let mut peer = scene.peer("importer");
                open_expecting_success(&backend, &exported, &mut peer, 1);
                assert_eq!(peer.ask("whole"), "true", "kind {}", kind.0);
                let enables = if two_links && kind == SHAREABLE { "2" } else { "0" };
                assert_eq!(peer.ask("calls aclrtDeviceEnablePeerAccess"), enables);
                assert_eq!(peer.ask("close"), "ok ");
                if !two_links {
                    backend.authorize(&exported, &unhex(&peer.ask("id"))).expect("the importer is listed");
                    let refused = peer.ask(&format!("open {} 0 3", encode(&exported)));
                    assert!(refused.contains("NoPeerAccess"), "{refused}");
                }
                peer.finish();
                backend.unexport(exported).expect("it goes back");
            }
            assert_eq!(raw.calls("aclrtDeviceEnablePeerAccess"), 0);
        });
    }
}

#[test]
fn event_of_the_other_die_is_awaited_through_a_relay() {
    scene!("soc=910_93;devices=2").play(
        &[("waiter", || {
            let backend = backend();
            serve(|handle, _| {
                let event = backend.open_event(&unhex(handle), ONE).expect("it opens");
                assert_eq!(event.device(), ZERO, "opening enables peer access, which the dies do not have");
                let stream = backend.create_stream(ONE).expect("a stream");
                event.wait_on(stream.as_borrowed()).expect("a wait");
                backend.synchronize(stream.as_borrowed()).expect("it is reached");
                "waited".to_owned()
            });
        })],
        |scene| {
            let backend = backend();
            let event = backend.create_event(ZERO).expect("an event");
            let stream = backend.create_stream(ZERO).expect("a stream");
            event.record(stream.as_borrowed()).expect("a record");
            let mut peer = scene.peer("waiter");
            assert_eq!(peer.ask(&hex(event.export().expect("a handle").as_slice())), "waited");
            peer.finish();
        },
    );
}

#[test]
fn allocations_on_310p_use_peer_pages() {
    scene!("soc=310p;devices=2").play(IMPORTER, |scene| {
        let backend = backend();
        for kind in [KEY, SHAREABLE] {
            let exported = share(&backend, ZERO, HUGE, kind);
            let mut peer = scene.peer("importer");
            open_expecting_success(&backend, &exported, &mut peer, 1);
            assert_eq!(peer.ask("whole"), "true", "kind {}", kind.0);
            close_and_unexport(&backend, exported, peer);
        }
    });
}

#[test]
fn copies_between_cards_of_one_process_work_both_ways() {
    scene!("devices=2").play(&[], |_| {
        let backend = backend();
        for (kind, from, to) in [(KEY, ZERO, ONE), (SHAREABLE, ONE, ZERO), (SHAREABLE, ZERO, ONE)] {
            let source = memory(&backend, from, HUGE, kind);
            for on in [from, to] {
                let target = backend.allocate_as(to, HUGE, kind).expect("memory");
                let stream = backend.create_stream(on).expect("a stream");
                // SAFETY: both ranges are ours.
                unsafe { backend.copy(target, source, stream.as_borrowed()) }.expect("a copy");
                backend.synchronize(stream.as_borrowed()).expect("it is done");
                let stream = backend.create_stream(to).expect("a stream");
                let seen = read(&backend, target, &*stream).expect("it can be read");
                assert!(seen == pattern(seen.len()), "kind {}, {from} to {to}, on {on}", kind.0);
                // SAFETY: no longer used.
                unsafe { backend.free(target) }.expect("it can be freed");
            }
        }
    });
}
