//! Memory of another card.

use device_ipc_ascend::{KEY, SHAREABLE};
use device_ipc_core::{Access, DeviceIpc, DeviceMemory, DeviceOrdinal, Error, HandleKind};

use crate::importer::{IMPORTER, hex, importer, let_go, opens, received, told, unhex};
use crate::memory::{HUGE, ONE, ZERO, backend, extent_of, memory, pattern, read, share};
use crate::support::{Raw, Scene};

#[test]
fn memory_of_another_card_is_copied_in_the_ways_that_work() {
    Scene::on("cards::memory_of_another_card_is_copied_in_the_ways_that_work", "soc=910b;devices=2")
        .play(|scene| copies_across(scene, KEY), IMPORTER);
}

#[test]
fn physical_memory_of_another_card_is_copied_in_the_ways_that_work() {
    Scene::on("cards::physical_memory_of_another_card_is_copied_in_the_ways_that_work", "soc=910b;devices=2")
        .play(|scene| copies_across(scene, SHAREABLE), IMPORTER);
}

fn copies_across(scene: &Scene, kind: HandleKind) {
    let backend = backend();
    // Less than a staging buffer holds, and more than one.
    for bytes in [HUGE, (64 << 20) + HUGE] {
        let range = memory(&backend, ZERO, bytes, kind);
        let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
        let mut peer = scene.peer("importer");
        opens(&backend, &exported, &mut peer, 1);
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
        assert!(seen == pattern(seen.len()), "what was written from the other card");
        let_go(&backend, exported, peer);
        // SAFETY: nobody uses it.
        unsafe { backend.free(range) }.expect("it can be freed");
    }
}

#[test]
fn a_card_that_cannot_import_a_key_is_told_the_way_out() {
    Scene::on("cards::a_card_that_cannot_import_a_key_is_told_the_way_out", "devices=2").play(
        |scene| {
            let backend = backend();
            let mut peer = scene.peer("refused");
            let key = memory(&backend, ZERO, HUGE, KEY);
            let exported = backend.export(&extent_of(&backend, key), None).expect("a key");
            backend.authorize(&exported, &unhex(&peer.hear())).expect("the importer is listed");
            let text = peer.ask(told(&exported));
            for phrase in
                ["507899", "[simulator]", "device 0", "device 1", "25.5.2", "at_home", "allocate_as", "plog"]
            {
                assert!(text.contains(phrase), "{phrase:?} is missing in {text}");
            }
            peer.finish();
            // And the way out is one.
            let exported = share(&backend, ZERO, HUGE, SHAREABLE);
            let mut peer = scene.peer("importer");
            opens(&backend, &exported, &mut peer, 1);
            assert_eq!(peer.ask("whole"), "true");
            assert_eq!(peer.ask("close"), "ok ");
            peer.finish();
        },
        &[
            ("importer", importer),
            ("refused", |told| {
                let (backend, raw) = (backend(), Raw::open());
                told.say(hex(&backend.local_peer_id(ZERO).expect("an id")));
                let line = told.hear().expect("a handle");
                let parts: Vec<&str> = line.split(':').collect();
                raw.fail_next("aclrtIpcMemImportByKey", 507_899);
                let handle = received(KEY, unhex(parts[1]), HUGE, Some(ZERO));
                told.say(backend.open(vec![handle], ONE, Access::ReadWrite).unwrap_err().to_string());
            }),
        ],
    );
}

#[test]
fn cards_without_access_to_each_other_are_told_so_before_the_driver_is_asked() {
    Scene::on(
        "cards::cards_without_access_to_each_other_are_told_so_before_the_driver_is_asked",
        "devices=2;peers=none",
    )
    .play(
        |_| {
            let (backend, raw) = (backend(), Raw::open());
            for kind in [KEY, SHAREABLE] {
                let bytes =
                    if kind == KEY { [b'a'; 64].into_iter().chain([0]).collect() } else { vec![1; 16] };
                let handle = received(kind, bytes, HUGE, Some(ZERO));
                let error = backend.open(vec![handle], ONE, Access::ReadWrite).unwrap_err();
                assert!(matches!(error, Error::NoPeerAccess { from: ONE, .. }), "{error:?}");
            }
            assert_eq!(raw.calls("aclrtIpcMemImportByKey"), 0);
            assert_eq!(raw.calls("aclrtMemImportFromShareableHandle"), 0);
        },
        &[],
    );
}

#[test]
fn peer_access_is_enabled_both_ways_and_its_status_is_not_asked() {
    // Positions 0 and 1 are the physical cards 4 and 5: the call that tells the status would take the physical id.
    const VISIBLE: &[(&str, &str)] = &[("ASCEND_RT_VISIBLE_DEVICES", "4,5")];
    Scene::on("cards::peer_access_is_enabled_both_ways_and_its_status_is_not_asked", "devices=8")
        .environment(VISIBLE)
        .play(
            |scene| {
                let (backend, raw) = (backend(), Raw::open());
                for kind in [KEY, SHAREABLE] {
                    let exported = share(&backend, ZERO, HUGE, kind);
                    let mut peer = scene.peer("importer");
                    opens(&backend, &exported, &mut peer, 1);
                    assert_eq!(peer.ask("whole"), "true", "kind {}", kind.0);
                    let enabled = if kind == KEY { "0" } else { "2" };
                    assert_eq!(peer.ask("calls aclrtDeviceEnablePeerAccess"), enabled);
                    assert_eq!(peer.ask("calls aclrtDevicePeerAccessStatus"), "0");
                    let_go(&backend, exported, peer);
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
            },
            IMPORTER,
        );
}

#[test]
fn dies_of_one_chip_share_without_peer_access() {
    for machine in ["soc=910_93;devices=4", "soc=910_93;devices=4;two-links"] {
        Scene::on("cards::dies_of_one_chip_share_without_peer_access", machine).play(
            |scene| {
                let (backend, raw) = (backend(), Raw::open());
                let two_links = scene.machine.contains("two-links");
                assert!(backend.peer_access(ONE, ZERO).expect("an answer"));
                let far = DeviceOrdinal::new(3);
                assert_eq!(backend.peer_access(far, ZERO).expect("an answer"), two_links);
                for kind in [KEY, SHAREABLE] {
                    let exported = share(&backend, ZERO, HUGE, kind);
                    let mut peer = scene.peer("importer");
                    opens(&backend, &exported, &mut peer, 1);
                    assert_eq!(peer.ask("whole"), "true", "kind {}", kind.0);
                    let enables = if two_links && kind == SHAREABLE { "2" } else { "0" };
                    assert_eq!(peer.ask("calls aclrtDeviceEnablePeerAccess"), enables);
                    assert_eq!(peer.ask("close"), "ok ");
                    if !two_links {
                        backend
                            .authorize(&exported, &unhex(&peer.ask("id")))
                            .expect("the importer is listed");
                        let refused = peer.ask(format!("open {} 0 3", told(&exported)));
                        assert!(refused.contains("NoPeerAccess"), "{refused}");
                    }
                    peer.finish();
                    backend.unexport(exported).expect("it goes back");
                }
                assert_eq!(raw.calls("aclrtDeviceEnablePeerAccess"), 0);
            },
            IMPORTER,
        );
    }
}

#[test]
fn an_event_of_the_other_die_is_opened_there_and_waited_for_here() {
    Scene::on("cards::an_event_of_the_other_die_is_opened_there_and_waited_for_here", "soc=910_93;devices=2")
        .play(
            |scene| {
                let backend = backend();
                let event = backend.create_event(ZERO).expect("an event");
                let stream = backend.create_stream(ZERO).expect("a stream");
                event.record(stream.as_borrowed()).expect("a record");
                let mut peer = scene.peer("waiter");
                assert_eq!(peer.ask(hex(event.export().expect("a handle").as_slice())), "waited");
                peer.finish();
            },
            &[("waiter", |told| {
                let backend = backend();
                told.serve(|handle| {
                    let event = backend.open_event(&unhex(handle), ONE).expect("it opens");
                    assert_eq!(
                        event.device(),
                        ZERO,
                        "opening enables peer access, which the dies do not have"
                    );
                    let stream = backend.create_stream(ONE).expect("a stream");
                    event.wait_on(stream.as_borrowed()).expect("a wait");
                    backend.synchronize(stream.as_borrowed()).expect("it is reached");
                    "waited".to_owned()
                });
            })],
        );
}

#[test]
fn a_310p_takes_pages_that_other_cards_reach() {
    Scene::on("cards::a_310p_takes_pages_that_other_cards_reach", "soc=310p;devices=2").play(
        |scene| {
            let backend = backend();
            for kind in [KEY, SHAREABLE] {
                let exported = share(&backend, ZERO, HUGE, kind);
                let mut peer = scene.peer("importer");
                opens(&backend, &exported, &mut peer, 1);
                assert_eq!(peer.ask("whole"), "true", "kind {}", kind.0);
                let_go(&backend, exported, peer);
            }
        },
        IMPORTER,
    );
}

#[test]
fn memory_of_two_cards_of_one_process_is_copied_both_ways() {
    Scene::on("cards::memory_of_two_cards_of_one_process_is_copied_both_ways", "devices=2").play(
        |_| {
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
                    // SAFETY: nobody uses it.
                    unsafe { backend.free(target) }.expect("it can be freed");
                }
            }
        },
        &[],
    );
}
