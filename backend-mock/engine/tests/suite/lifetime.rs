//! Opened memory after a free, a revocation, and the death of its exporter.

use super::support::{Peer, code, machine};
use device_ipc_mock_engine::{Access, EngineError, Revocation};
use device_ipc_test_process::{hex, unhex};

const INVALID_HANDLE: i32 = 10;
const EXPORTER_GONE: i32 = 12;
const REVOKED: i32 = 16;

/// Spawns a peer with an allocation of 4096 bytes of value 7. Returns the peer, the address and the handle.
fn exporter(spec: &str) -> (Peer, u64, Vec<u8>) {
    let peer = Peer::spawn(spec);
    let block = peer.address("allocate 0 4096");
    let stream = peer.ok("stream 0");
    peer.ok(&format!("fill {block} 4096 7 {stream}"));
    peer.ok(&format!("synchronize {stream}"));
    let handle = unhex(&peer.ok(&format!("export {block}")));
    (peer, block, handle)
}

#[test]
fn pinning_mapping_survives_exporter_free_and_death() {
    let ours = machine("");
    let (mut peer, block, handle) = exporter("");
    let stream = ours.create_stream(0).unwrap();
    let opened = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();

    peer.ok(&format!("free {block}"));
    assert_eq!(ours.read_to_host(opened, 4096, stream).unwrap(), [7; 4096]);
    assert_eq!(code(ours.open(&handle, None, 1, Access::ReadWrite)), INVALID_HANDLE);

    peer.kill();
    ours.add_u8(opened, 4096, 1, stream).unwrap();
    assert_eq!(ours.read_to_host(opened, 4096, stream).unwrap(), [8; 4096]);
    let gone = Err(EngineError::ExporterGone { pid: peer.pid() });
    assert_eq!(ours.open(&handle, None, 1, Access::ReadWrite), gone);
    ours.close(opened).unwrap();
}

#[test]
fn unexport_with_pinning_lifetime_has_no_effect() {
    let ours = machine("");
    let (peer, block, handle) = exporter("");
    peer.ok(&format!("unexport {block}"));
    assert!(ours.open(&handle, None, 0, Access::ReadWrite).is_ok());
}

#[test]
fn death_of_revoking_exporter_revokes_mapping() {
    let ours = machine("");
    let (mut peer, _, handle) = exporter("lifetime=revoking");
    let stream = ours.create_stream(0).unwrap();
    let own = ours.allocate(0, 4096).unwrap();
    let opened = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();
    assert_eq!(ours.read_to_host(opened, 1, stream).unwrap(), [7]);

    peer.kill();
    let revoked = EngineError::Revoked { address: opened, why: Revocation::ExporterExited };
    let assert_revoked = || assert_eq!(ours.synchronize(stream), Err(revoked.clone()));
    ours.add_u8(opened, 1, 1, stream).unwrap();
    assert_revoked();
    ours.copy(own, opened, 4096, stream).unwrap();
    assert_revoked();
    ours.fill(opened, 1, 1, stream).unwrap();
    assert_revoked();
    ours.wait_value64(stream, opened, u64::MAX).unwrap();
    assert_revoked();
    assert_eq!(ours.read_to_host(opened, 1, stream), Err(revoked.clone()));
    assert_eq!(code(ours.open(&handle, None, 1, Access::ReadWrite)), EXPORTER_GONE);
    ours.close(opened).unwrap();
    assert_eq!(ours.read_to_host(own, 1, stream).unwrap(), [0], "the stream works again");
}

#[test]
fn free_by_revoking_exporter_revokes_mapping() {
    let ours = machine("");
    let (peer, block, handle) = exporter("lifetime=revoking");
    let stream = ours.create_stream(0).unwrap();
    let opened = ours.open(&handle, None, 0, Access::ReadOnly).unwrap();
    peer.ok(&format!("free {block}"));
    let revoked = Err(EngineError::Revoked { address: opened, why: Revocation::Freed });
    assert_eq!(ours.read_to_host(opened, 1, stream), revoked);
    assert_eq!(code(ours.open(&handle, None, 1, Access::ReadWrite)), INVALID_HANDLE);
    assert_eq!(peer.address("allocate 0 4096"), block);
    assert_eq!(
        code(ours.open(&handle, None, 1, Access::ReadWrite)),
        INVALID_HANDLE,
        "a revoking exporter's stale handle never opens another allocation"
    );
}

#[test]
fn revoked_export_is_rejected_and_new_export_opens() {
    let ours = machine("");
    let (peer, block, handle) = exporter("lifetime=revoking");
    let stream = ours.create_stream(0).unwrap();
    let opened = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();
    peer.ok(&format!("unexport {block}"));
    let revoked = Err(EngineError::Revoked { address: opened, why: Revocation::Unexported });
    assert_eq!(ours.read_to_host(opened, 1, stream), revoked);
    assert_eq!(code(ours.open(&handle, None, 0, Access::ReadWrite)), INVALID_HANDLE);

    let handle = unhex(&peer.ok(&format!("export {block}")));
    let again = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();
    assert_ne!(again, opened);
    assert_eq!(ours.read_to_host(again, 1, stream).unwrap(), [7]);
}

#[test]
fn unexport_waits_for_running_importer_work() {
    let ours = machine("lifetime=revoking");
    const SIZE: u64 = 1 << 20;
    let block = ours.allocate(0, SIZE).unwrap();
    let (stream, peer) = (ours.create_stream(0).unwrap(), Peer::spawn(""));
    let opened = peer.address(&format!("open {} 0 rw", hex(&ours.export_bytes(block).unwrap())));
    let their_stream = peer.ok("stream 0");
    for _ in 0..500 {
        peer.ok(&format!("add {opened} {SIZE} 1 {their_stream}"));
    }
    ours.wait_value64(stream, block, 1).unwrap();
    ours.synchronize(stream).unwrap();
    ours.unexport(block).unwrap();
    let at_once = ours.read_to_host(block, SIZE, stream).unwrap();
    assert_eq!(peer.fails(&format!("synchronize {their_stream}")), REVOKED, "its work was still running");
    assert!(at_once == ours.read_to_host(block, SIZE, stream).unwrap());
    assert!(at_once.iter().all(|&byte| byte == at_once[0]), "the running kernel completed");
}

#[test]
fn waiting_importer_stream_does_not_block_free() {
    let ours = machine("");
    let (peer, block, handle) = exporter("lifetime=revoking");
    let stream = ours.create_stream(0).unwrap();
    let opened = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();
    ours.wait_value64(stream, opened, u64::MAX).unwrap();
    peer.ok(&format!("free {block}"));
    let revoked = Err(EngineError::Revoked { address: opened, why: Revocation::Freed });
    assert_eq!(ours.synchronize(stream), revoked);
}

#[test]
fn descriptor_pins_memory_with_revoking_lifetime() {
    let ours = machine("");
    let (mut peer, block, _) = exporter("lifetime=revoking");
    let (handle, fd) = peer.ok_with(&format!("export_fd {block}"), None);
    let fd = fd.unwrap();
    let again = fd.try_clone().unwrap();
    let stream = ours.create_stream(0).unwrap();
    let opened = ours.open(&unhex(&handle), Some(fd), 0, Access::ReadWrite).unwrap();
    peer.ok(&format!("free {block}"));
    peer.kill();
    assert_eq!(ours.read_to_host(opened, 4096, stream).unwrap(), [7; 4096]);
    let other = ours.open(&unhex(&handle), Some(again), 1, Access::ReadOnly).unwrap();
    assert_eq!(ours.read_to_host(other, 4096, stream).unwrap(), [7; 4096]);
}

#[test]
fn open_event_after_exporter_exit_fails() {
    let ours = machine("");
    let mut peer = Peer::spawn("");
    let event = peer.ok("event 0");
    let handle = unhex(&peer.ok(&format!("export_event {event}")));
    peer.kill();
    assert_eq!(code(ours.open_event(&handle, 0)), EXPORTER_GONE);
}
