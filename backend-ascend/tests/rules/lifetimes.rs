//! Mappings after the exporter's exit.

use device_ipc_ascend::{AscendBackend, KEY, SHAREABLE};
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, HandleKind, Lifetime, Opened};
use device_ipc_core::{Access, Error};
use device_ipc_test_process::{answer, hex, request, unhex};

use super::importer::{encode, received};
use super::memory::{HUGE, ZERO, backend, extent_of, memory, pattern, read};
use super::support::{Scene, scene};

#[test]
fn exporter_exit_revokes_key_and_use_fails() {
    scene!("devices=1").play(&[("exporter", exporter)], |scene| {
        let backend = backend();
        assert_eq!(backend.handle_kinds()[0].lifetime, Lifetime::Revokes);
        let opened = open_then_kill_exporter(scene, KEY, &backend);
        let stream = backend.create_stream(ZERO).expect("a stream");
        let error = read(&backend, opened.range, &*stream).unwrap_err();
        assert!(matches!(error, Error::Vendor(_)), "{error:?}");
        // The range counts as closed, even though the driver returns an error for a revoked key.
        let _ = backend.close(opened);
    });
}

#[test]
fn shareable_handle_pins_memory_after_exporter_exit() {
    scene!("devices=1").play(&[("exporter", exporter)], |scene| {
        let backend = backend();
        let kind = backend.handle_kinds().into_iter().find(|kind| kind.kind == SHAREABLE).expect("the kind");
        assert_eq!(kind.lifetime, Lifetime::Pins);
        let opened = open_then_kill_exporter(scene, SHAREABLE, &backend);
        let stream = backend.create_stream(ZERO).expect("a stream");
        let bytes = read(&backend, opened.range, &*stream).expect("the memory is pinned");
        assert_eq!(bytes, pattern(bytes.len()));
        backend.close(opened).expect("it closes");
    });
}

/// Makes another process export memory, opens it, and kills that process.
fn open_then_kill_exporter(scene: &Scene, kind: HandleKind, backend: &AscendBackend) -> Opened {
    let mut peer = scene.peer("exporter");
    peer.send(&format!("{} {}", kind.0, hex(&backend.local_peer_id(ZERO).expect("an id"))));
    let handle = peer.receive();
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

fn exporter() {
    let backend = backend();
    let line = request().expect("a kind and an importer");
    let (kind, peer) = line.trim().split_once(' ').expect("two words");
    let range = memory(&backend, ZERO, HUGE, HandleKind(kind.parse().expect("a number")));
    let exported = backend.export(&extent_of(&backend, range), None).expect("a handle");
    backend.authorize(&exported, &unhex(peer)).expect("the importer is listed");
    answer(encode(&exported));
    request();
}
