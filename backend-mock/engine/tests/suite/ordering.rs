//! Ordering of the streams of two processes by events and 64-bit words.

use std::time::{Duration, Instant};

use super::support::{DEADLINE, Peer, code, machine};
use device_ipc_mock_engine::{Access, EngineError};
use device_ipc_test_process::{hex, unhex};

const INVALID_HANDLE: i32 = 10;
const OWN_PROCESS: i32 = 11;
const NOT_SUPPORTED: i32 = 20;

/// The value of a word that opens a gate: a stream waits until another stream writes it.
const GATE: u64 = 1;

#[test]
fn event_wait_orders_other_process_behind_delayed_work() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let (block, gate) = (ours.allocate(0, 4096).unwrap(), ours.allocate(0, 8).unwrap());
    let (stream, opener) = (ours.create_stream(0).unwrap(), ours.create_stream(0).unwrap());
    let event = ours.create_event(0, true).unwrap();
    let handle = hex(&ours.export_bytes(block).unwrap());
    let theirs = peer.address(&format!("open {handle} 1 rw"));
    let their_event = peer.ok(&format!("open_event {} 1", hex(&ours.export_event(event).unwrap())));
    let (careful, careless) = (peer.ok("stream 1"), peer.ok("stream 1"));

    ours.wait_value64(stream, gate, GATE).unwrap();
    ours.fill(block, 4096, 5, stream).unwrap();
    ours.record(event, stream).unwrap();
    assert_eq!(ours.query_event(event), Ok(false));

    peer.ok(&format!("wait {careful} {their_event}"));
    peer.ok(&format!("add {theirs} 1 10 {careful}"));
    assert_eq!(
        peer.ok(&format!("read {theirs} 1 {careless}")),
        "00",
        "without the wait the old value is read"
    );

    ours.write_value64(opener, gate, GATE).unwrap();
    assert_eq!(peer.ok(&format!("read {theirs} 1 {careful}")), "0f");
    assert_eq!(ours.synchronize_event(event, Some(DEADLINE)), Ok(true));
}

#[test]
fn wait_captures_latest_record_of_either_process() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let event = ours.create_event(0, true).unwrap();
    let their_event = peer.ok(&format!("open_event {} 0", hex(&ours.export_event(event).unwrap())));
    let (stream, their_stream) = (ours.create_stream(0).unwrap(), peer.ok("stream 0"));
    assert_eq!(ours.query_event(event), Ok(true), "complete before any record");
    assert_eq!(ours.synchronize_event(event, None), Ok(true));

    let gate = peer.address("allocate 0 8");
    peer.ok(&format!("wait_value {their_stream} {gate} {GATE}"));
    peer.ok(&format!("record {their_event} {their_stream}"));
    assert_eq!(ours.query_event(event), Ok(false));
    let own_gate = ours.allocate(0, 8).unwrap();
    ours.wait_value64(stream, own_gate, GATE).unwrap();
    ours.wait(stream, event).unwrap();
    let other = ours.create_stream(0).unwrap();
    ours.record(event, other).unwrap();
    assert_eq!(ours.synchronize_event(event, Some(DEADLINE)), Ok(true), "the latest record is ours");
    ours.write_value64(other, own_gate, GATE).unwrap();
    let short = Duration::from_millis(50);
    assert_eq!(ours.synchronize_timeout(stream, short), Ok(false), "the wait captured the peer's record");
    peer.ok(&format!("write_value {} {gate} {GATE}", peer.ok("stream 0")));
    ours.synchronize(stream).unwrap();
}

#[test]
fn host_wait_returns_after_limit() {
    let ours = machine("");
    let (stream, opener) = (ours.create_stream(0).unwrap(), ours.create_stream(0).unwrap());
    let gate = ours.allocate(0, 8).unwrap();
    for interprocess in [false, true] {
        let event = ours.create_event(0, interprocess).unwrap();
        ours.write_value64(opener, gate, 0).unwrap();
        ours.synchronize(opener).unwrap();
        ours.wait_value64(stream, gate, GATE).unwrap();
        ours.record(event, stream).unwrap();
        let begun = Instant::now();
        let limit = Duration::from_millis(30);
        assert_eq!(ours.synchronize_event(event, Some(limit)), Ok(false));
        assert!(begun.elapsed() >= limit);
        assert_eq!(ours.synchronize_timeout(stream, limit), Ok(false));
        ours.write_value64(opener, gate, GATE).unwrap();
        assert_eq!(ours.synchronize_event(event, None), Ok(true));
        assert_eq!(ours.synchronize_timeout(stream, DEADLINE), Ok(true));
    }
}

#[test]
fn wait_after_death_of_recorder_fails() {
    let (ours, mut peer) = (machine(""), Peer::spawn(""));
    let event = ours.create_event(0, true).unwrap();
    let their_event = peer.ok(&format!("open_event {} 0", hex(&ours.export_event(event).unwrap())));
    let their_stream = peer.ok("stream 0");
    let gate = peer.address("allocate 0 8");
    peer.ok(&format!("wait_value {their_stream} {gate} {GATE}"));
    peer.ok(&format!("record {their_event} {their_stream}"));
    let stream = ours.create_stream(0).unwrap();
    ours.wait(stream, event).unwrap();
    assert_eq!(ours.query(stream), Ok(false));
    peer.kill();
    let lost = EngineError::PeerLost { pid: peer.pid() };
    assert_eq!(ours.synchronize(stream), Err(lost.clone()));
    assert_eq!(ours.synchronize_event(event, None), Err(lost));
    ours.record(event, stream).unwrap();
    assert_eq!(ours.synchronize_event(event, None), Ok(true), "a new record replaces the lost one");
}

#[test]
fn wait_for_record_behind_failed_work_fails() {
    let (ours, peer) = (machine(""), Peer::spawn("fault=run:1"));
    let event = peer.ok("event 0");
    let handle = peer.ok(&format!("export_event {event}"));
    let opened = ours.open_event(&unhex(&handle), 0).unwrap();
    let their_stream = peer.ok("stream 0");
    peer.ok(&format!("host_fn {their_stream}"));
    peer.ok(&format!("record {event} {their_stream}"));
    let stream = ours.create_stream(0).unwrap();
    ours.wait(stream, opened).unwrap();
    assert_eq!(ours.synchronize(stream), Err(EngineError::RecordFailed));
    assert_eq!(peer.fails(&format!("synchronize {their_stream}")), 25);
}

#[test]
fn invalid_event_handles_are_rejected() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let event = ours.create_event(0, true).unwrap();
    assert_eq!(code(ours.open_event(&ours.export_event(event).unwrap(), 0)), OWN_PROCESS);
    let local = ours.create_event(0, false).unwrap();
    assert!(matches!(ours.export_event(local), Err(EngineError::InvalidValue { .. })));

    let theirs = peer.ok("event 0");
    let handle = unhex(&peer.ok(&format!("export_event {theirs}")));
    let opened = ours.open_event(&handle, 0).unwrap();
    assert!(matches!(ours.export_event(opened), Err(EngineError::InvalidValue { .. })));
    assert_eq!(code(ours.open(&handle, None, 0, Access::ReadWrite)), INVALID_HANDLE);
    peer.ok(&format!("destroy_event {theirs}"));
    assert_eq!(code(ours.open_event(&handle, 0)), INVALID_HANDLE);
    peer.ok("event 0");
    assert_eq!(code(ours.open_event(&handle, 0)), INVALID_HANDLE, "stale handles of events are rejected");
    peer.ok("allocate 0 4096");

    let without = machine("events=off");
    assert_eq!(code(without.create_event(0, true)), NOT_SUPPORTED);
    assert_eq!(code(without.open_event(&handle, 0)), NOT_SUPPORTED);
    assert!(without.create_event(0, false).is_ok());
}

#[test]
fn words_order_streams_of_two_processes() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let block = ours.allocate(0, 4096).unwrap();
    let (ping, pong, data) = (block, block.add(8), block.add(64));
    let handle = hex(&ours.export_bytes(block).unwrap());
    let theirs = peer.address(&format!("open {handle} 1 rw"));
    let (stream, their_stream) = (ours.create_stream(0).unwrap(), peer.ok("stream 1"));
    const ROUNDS: u64 = 20;
    for round in 1..=ROUNDS {
        peer.ok(&format!("wait_value {their_stream} {theirs} {round}"));
        peer.ok(&format!("add {} 16 1 {their_stream}", theirs + 64));
        peer.ok(&format!("write_value {their_stream} {} {round}", theirs + 8));
    }
    for round in 1..=ROUNDS {
        ours.add_u8(data, 16, 1, stream).unwrap();
        ours.write_value64(stream, ping, round).unwrap();
        ours.wait_value64(stream, pong, round).unwrap();
    }
    assert_eq!(ours.read_to_host(data, 16, stream).unwrap(), [2 * ROUNDS as u8; 16]);
}

#[test]
fn maximum_value_releases_stream_that_waits_for_dead_peer() {
    let (ours, mut peer) = (machine(""), Peer::spawn(""));
    let word = peer.address("allocate 0 8");
    let handle = unhex(&peer.ok(&format!("export {word}")));
    let opened = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();
    let (stream, rescue) = (ours.create_stream(0).unwrap(), ours.create_stream(0).unwrap());
    ours.wait_value64(stream, opened, 12).unwrap();
    peer.kill();
    assert_eq!(ours.query(stream), Ok(false));
    ours.write_value64(rescue, opened, 1 << 62).unwrap();
    ours.synchronize(stream).unwrap();
}
