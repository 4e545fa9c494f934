//! What an importer has when its exporter has ended.

use device_ipc_ascend::{AscendBackend, KEY, SHAREABLE};
use device_ipc_core::{Access, DeviceIpc, DeviceMemory, Error, HandleKind, Lifetime, Opened};

use crate::importer::{hex, received, told, unhex};
use crate::memory::{HUGE, ZERO, backend, extent_of, memory, pattern, read};
use crate::support::{Scene, Told};

#[test]
fn the_exporters_end_revokes_a_key_and_use_is_an_error() {
    Scene::on("lifetimes::the_exporters_end_revokes_a_key_and_use_is_an_error", "devices=1").play(
        |scene| {
            let backend = backend();
            assert_eq!(backend.handle_kinds()[0].lifetime, Lifetime::Revokes);
            let opened = opened_of_the_dead(scene, KEY, &backend);
            let stream = backend.create_stream(ZERO).expect("a stream");
            let error = read(&backend, opened.range, &*stream).unwrap_err();
            assert!(matches!(error, Error::Vendor(_)), "{error:?}");
            // The range counts as closed, whatever the driver says of a key that has gone.
            let _ = backend.close(opened);
        },
        &[("exporter", exporter)],
    );
}

#[test]
fn a_shareable_handle_pins_the_memory_over_its_exporters_end() {
    Scene::on("lifetimes::a_shareable_handle_pins_the_memory_over_its_exporters_end", "devices=1").play(
        |scene| {
            let backend = backend();
            let kind =
                backend.handle_kinds().into_iter().find(|kind| kind.kind == SHAREABLE).expect("the kind");
            assert_eq!(kind.lifetime, Lifetime::Pins);
            let opened = opened_of_the_dead(scene, SHAREABLE, &backend);
            let stream = backend.create_stream(ZERO).expect("a stream");
            let bytes = read(&backend, opened.range, &*stream).expect("the memory is pinned");
            assert_eq!(bytes, pattern(bytes.len()));
            backend.close(opened).expect("it closes");
        },
        &[("exporter", exporter)],
    );
}

/// Has another process export memory, opens it, and kills that process.
fn opened_of_the_dead(scene: &Scene, kind: HandleKind, backend: &AscendBackend) -> Opened {
    let mut peer = scene.peer("exporter");
    peer.say(format!("{} {}", kind.0, hex(&backend.local_peer_id(ZERO).expect("an id"))));
    let handle = peer.hear();
    let parts: Vec<&str> = handle.split(':').collect();
    let size = parts[2].parse().expect("a number");
    let handle = received(kind, unhex(parts[1]), size, Some(ZERO));
    let opened = backend.open(vec![handle], ZERO, Access::ReadWrite).expect("it can be opened");
    let stream = backend.create_stream(ZERO).expect("a stream");
    let bytes = read(backend, opened.range, &*stream).expect("it can be read");
    assert_eq!(bytes, pattern(bytes.len()));
    peer.kill();
    opened
}

fn exporter(told_what: &Told) {
    let backend = backend();
    let line = told_what.hear().expect("a kind and an importer");
    let (kind, peer) = line.trim().split_once(' ').expect("two words");
    let range = memory(&backend, ZERO, HUGE, HandleKind(kind.parse().expect("a number")));
    let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
    backend.authorize(&exported, &unhex(peer)).expect("the importer is listed");
    told_what.say(told(&exported));
    told_what.hear();
}
