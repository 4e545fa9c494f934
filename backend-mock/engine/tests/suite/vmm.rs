//! Virtual memory management: blocks, reserved ranges, mappings, access by device; registered host memory and kernels.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::support::{Peer, code, machine};
use device_ipc_mock_engine::{Access, Address, BlockId, EngineError, Machine, StreamId};

const MIB: u64 = 1 << 20;
const INVALID_VALUE: i32 = 2;
const UNKNOWN_ADDRESS: i32 = 4;
const INVALID_HANDLE: i32 = 10;
const OWN_PROCESS: i32 = 11;
const EXPORTER_GONE: i32 = 12;
const NO_PEER_ACCESS: i32 = 14;
const READ_ONLY: i32 = 15;
const ILLEGAL_ADDRESS: i32 = 17;
const INVALID_BLOCK: i32 = 29;

/// Maps a whole block with read-write access of device 0.
fn map(machine: &Machine, block: BlockId) -> Address {
    let size = machine.block_info(block).unwrap().size;
    let address = machine.reserve(size, 0).unwrap();
    machine.map_block(address, size, 0, block).unwrap();
    machine.set_access(address, size, 0, Some(Access::ReadWrite)).unwrap();
    address
}

fn read(machine: &Machine, address: Address, len: u64) -> Vec<u8> {
    let stream = machine.default_stream(0).unwrap();
    machine.read_to_host(address, len, stream).unwrap()
}

fn fill(
    machine: &Machine,
    address: Address,
    len: u64,
    byte: u8,
    stream: StreamId,
) -> Result<(), EngineError> {
    machine.fill(address, len, byte, stream).unwrap();
    machine.synchronize(stream)
}

#[test]
fn mappings_of_one_block_share_bytes() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.create_block(0, MIB).unwrap();
    let (first, second) = (map(&ours, block), map(&ours, block));
    fill(&ours, first, MIB, 7, stream).unwrap();
    assert_eq!(read(&ours, second, MIB), vec![7; MIB as usize]);

    // The second half of it, alone.
    let part = ours.reserve(MIB, 2 * MIB).unwrap();
    assert!(part.get().is_multiple_of(2 * MIB));
    ours.map_block(part, MIB / 2, MIB / 2, block).unwrap();
    ours.set_access(part, MIB / 2, 0, Some(Access::ReadWrite)).unwrap();
    fill(&ours, part, MIB / 2, 9, stream).unwrap();
    assert_eq!(read(&ours, first, MIB)[MIB as usize / 2 - 1..][..2], [7, 9]);
    let mapped = ours.mapped_block(part.add(5)).unwrap();
    assert_eq!((mapped.base, mapped.size, mapped.offset), (part, MIB / 2, MIB / 2));
    assert_eq!((mapped.block.block, mapped.reservation), (block, (part, MIB)));
    assert_eq!(code(ours.fill(part, MIB / 2 + 1, 0, stream)), 8, "nothing is mapped behind it");
}

#[test]
fn adjacent_mappings_form_one_range() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let space = ours.reserve(2 * MIB, 0).unwrap();
    for half in [0, MIB] {
        let block = ours.create_block(0, MIB).unwrap();
        ours.map_block(space.add(half), MIB, 0, block).unwrap();
        ours.release_block(block).unwrap();
    }
    ours.set_access(space, 2 * MIB, 0, Some(Access::ReadWrite)).unwrap();
    fill(&ours, space, 2 * MIB, 3, stream).unwrap();
    assert_eq!(read(&ours, space.add(MIB - 1), 2), [3, 3]);
    ours.unmap_blocks(space, 2 * MIB).unwrap();
    assert_eq!(ours.memory_info(0).unwrap().0, ours.memory_info(0).unwrap().1);
}

#[test]
fn block_counts_as_used_until_last_handle_and_mapping() {
    let ours = machine("memory=4MiB");
    let free = || ours.memory_info(0).unwrap().0;
    let block = ours.create_block(0, 4 * MIB).unwrap();
    assert_eq!(free(), 0);
    assert!(matches!(ours.create_block(0, MIB), Err(EngineError::OutOfMemory { .. })));
    let address = map(&ours, block);
    let again = ours.retain_block_at(address.add(100)).unwrap();
    assert_eq!(again, block);
    ours.release_block(block).unwrap();
    ours.unmap_blocks(address, 4 * MIB).unwrap();
    assert_eq!(free(), 0, "one handle is left");
    ours.release_block(block).unwrap();
    assert_eq!(free(), 4 * MIB);
    assert_eq!(code(ours.release_block(block)), INVALID_BLOCK);
    assert_eq!(code(ours.block_info(block)), INVALID_BLOCK);

    let block = ours.create_block(0, 4 * MIB).unwrap();
    let address = map(&ours, block);
    ours.release_block(block).unwrap();
    assert_eq!(free(), 0, "the mapping is left");
    ours.unmap_blocks(address, 4 * MIB).unwrap();
    assert_eq!(free(), 4 * MIB);
    let sparse = ours.create_sparse_block(0, 64 * MIB).expect("a sparse block counts nothing");
    let again = ours.import_block_fd(ours.export_block_fd(sparse).unwrap()).unwrap();
    assert!(
        ours.block_info(again).unwrap().sparse && !ours.block_info(block).is_ok_and(|block| block.sparse)
    );
}

#[test]
fn partial_pages_and_unknown_ranges_are_rejected() {
    let ours = machine("");
    for size in [0, 1, MIB + 1] {
        assert_eq!(code(ours.create_block(0, size)), INVALID_VALUE);
        assert_eq!(code(ours.reserve(size, 0)), INVALID_VALUE);
    }
    assert_eq!(code(ours.create_block(9, MIB)), 1);
    assert_eq!(code(ours.reserve(MIB, 3 * MIB)), INVALID_VALUE);
    let block = ours.create_block(0, MIB).unwrap();
    let space = ours.reserve(2 * MIB, 0).unwrap();
    assert_eq!(code(ours.map_block(space, 2 * MIB, 0, block)), INVALID_VALUE);
    assert_eq!(code(ours.map_block(space, MIB, u64::MAX - 4095, block)), INVALID_VALUE);
    assert_eq!(code(ours.map_block(space.add(1), 4096, 0, block)), INVALID_VALUE);
    assert_eq!(code(ours.map_block(space.add(2 * MIB), MIB, 0, block)), UNKNOWN_ADDRESS);
    assert_eq!(code(ours.map_block(Address::new(4096), MIB, 0, block)), UNKNOWN_ADDRESS);
    ours.map_block(space, MIB, 0, block).unwrap();
    assert_eq!(code(ours.map_block(space.add(MIB / 2), MIB, 0, block)), INVALID_VALUE, "taken");
    assert_eq!(code(ours.unmap_blocks(space, MIB / 2)), INVALID_VALUE, "a part");
    assert_eq!(code(ours.set_access(space, 2 * MIB, 0, None)), INVALID_VALUE, "a gap");
    assert_eq!(code(ours.unreserve(space, 2 * MIB)), INVALID_VALUE, "in use");
    ours.unmap_blocks(space, MIB).unwrap();
    assert_eq!(code(ours.unreserve(space, MIB)), INVALID_VALUE, "a part");
    ours.unreserve(space, 2 * MIB).unwrap();
    assert_eq!(code(ours.unreserve(space, 2 * MIB)), UNKNOWN_ADDRESS);

    // Plain memory is not of this kind, and this kind is not plain.
    let plain = ours.allocate(0, MIB).unwrap();
    assert_eq!(code(ours.retain_block_at(plain)), UNKNOWN_ADDRESS);
    assert_eq!(ours.mapped_block(plain), None);
    let address = map(&ours, block);
    assert_eq!(code(ours.free(address)), UNKNOWN_ADDRESS);
    assert_eq!(code(ours.export_bytes(address)), UNKNOWN_ADDRESS);
    assert_eq!(code(ours.close(address)), 7);
}

#[test]
fn access_is_set_by_device() {
    let ours = machine("devices=3;peers=1>0");
    let block = ours.create_block(0, MIB).unwrap();
    let address = ours.reserve(MIB, 0).unwrap();
    ours.map_block(address, MIB, 0, block).unwrap();
    let streams: Vec<_> = (0..3).map(|device| ours.create_stream(device).unwrap()).collect();
    let illegal = |result| assert_eq!(code(result), ILLEGAL_ADDRESS);
    illegal(fill(&ours, address, MIB, 1, streams[0]));
    assert_eq!(ours.access_of(address, 0), Ok(None));

    ours.set_access(address, MIB, 0, Some(Access::ReadOnly)).unwrap();
    assert_eq!(code(fill(&ours, address, MIB, 1, streams[0])), READ_ONLY);
    ours.add_u8(address, 1, 1, streams[0]).unwrap();
    assert_eq!(code(ours.synchronize(streams[0])), READ_ONLY);
    assert_eq!(read(&ours, address, 1), [0]);
    assert_eq!(ours.access_of(address, 0), Ok(Some(Access::ReadOnly)));

    ours.set_access(address, MIB, 1, Some(Access::ReadWrite)).unwrap();
    fill(&ours, address, MIB, 5, streams[1]).unwrap();
    assert_eq!(read(&ours, address, 1), [5]);
    ours.set_access(address, MIB, 1, None).unwrap();
    illegal(fill(&ours, address, MIB, 1, streams[1]));
    illegal(fill(&ours, address, MIB, 1, streams[2]));
    assert_eq!(code(ours.set_access(address, MIB, 2, Some(Access::ReadOnly))), NO_PEER_ACCESS);
}

#[test]
fn queued_work_fails_after_unmap() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.create_block(0, MIB).unwrap();
    let address = map(&ours, block);
    let gate = ours.allocate(0, 8).unwrap();
    ours.wait_value64(stream, gate, 1).unwrap();
    ours.fill(address, MIB, 1, stream).unwrap();
    ours.unmap_blocks(address, MIB).unwrap();
    ours.write_value64(ours.create_stream(0).unwrap(), gate, 1).unwrap();
    // Waits until no queued work uses the addresses.
    ours.map_block(address, MIB, 0, ours.create_block(0, MIB).unwrap()).unwrap();
    ours.set_access(address, MIB, 0, Some(Access::ReadWrite)).unwrap();
    assert_eq!(code(ours.synchronize(stream)), ILLEGAL_ADDRESS);
    assert_eq!(read(&ours, address, MIB), vec![0; MIB as usize]);
}

#[test]
fn new_mapping_stays_when_queued_work_gives_up_its_addresses() {
    const ROUNDS: u64 = 500;
    let ours = machine("");
    let (stream, opener) = (ours.create_stream(0).unwrap(), ours.create_stream(0).unwrap());
    let gate = ours.allocate(0, 8).unwrap();
    let address = ours.reserve(MIB, 0).unwrap();
    for round in 1..=ROUNDS {
        let block = ours.create_block(0, MIB).unwrap();
        ours.map_block(address, MIB, 0, block).unwrap();
        ours.release_block(block).unwrap();
        ours.set_access(address, MIB, 0, Some(Access::ReadWrite)).unwrap();
        assert_eq!(read(&ours, address, MIB), vec![0; MIB as usize]);
        let failed = ours.synchronize(stream).is_err();
        assert_eq!(failed, round > 1, "the work of the round before");
        ours.wait_value64(stream, gate, round).unwrap();
        ours.fill(address, MIB, 1, stream).unwrap();
        ours.unmap_blocks(address, MIB).unwrap();
        ours.write_value64(opener, gate, round).unwrap();
    }
}

#[test]
fn block_descriptor_survives_exporter_death() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let mut peer = Peer::spawn("");
    let theirs = peer.ok(&format!("create_block 1 {MIB}"));
    let (_, fd) = peer.ok_with(&format!("export_block_fd {theirs}"), None);
    let fd = fd.expect("a descriptor came");
    let block = ours.import_block_fd(fd.as_fd().try_clone_to_owned().unwrap()).unwrap();
    let info = ours.block_info(block).unwrap();
    assert_eq!((info.device, info.size, info.imported), (Some(1), MIB, true));
    assert_eq!(code(ours.export_block_fd(block)), INVALID_VALUE);

    let address = map(&ours, block);
    fill(&ours, address, MIB, 4, stream).unwrap();
    let there = peer.address(&format!("map_block {theirs} 1"));
    let their_stream = peer.ok("stream 1");
    assert_eq!(peer.ok(&format!("read {there} 2 {their_stream}")), "0404");
    peer.kill();
    assert_eq!(read(&ours, address, 1), [4]);
    // The descriptor itself opens it still.
    assert_eq!(read(&ours, map(&ours, ours.import_block_fd(fd).unwrap()), 1), [4]);
    let nothing = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(code(ours.import_block_fd(nothing.into())), INVALID_HANDLE);
    let plain = ours.export_fd(ours.allocate(0, MIB).unwrap()).unwrap().0;
    assert_eq!(code(ours.import_block_fd(plain)), INVALID_HANDLE);
}

#[test]
fn own_block_imports_by_descriptor_only() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.create_block(0, MIB).unwrap();
    let again = ours.import_block_fd(ours.export_block_fd(block).unwrap()).unwrap();
    assert_ne!(again, block);
    fill(&ours, map(&ours, again), MIB, 6, stream).unwrap();
    assert_eq!(read(&ours, map(&ours, block), 1), [6]);
    let number = ours.export_block_number(block).unwrap();
    assert_eq!(Machine::exporter_of_number(number), std::process::id());
    assert_eq!(code(ours.import_block_number(number)), OWN_PROCESS);
}

#[test]
fn block_number_imports_while_exporter_has_block() {
    let ours = machine("");
    let mut peer = Peer::spawn("");
    let theirs = peer.ok(&format!("create_block 0 {MIB}"));
    let there = peer.address(&format!("map_block {theirs} 0"));
    let their_stream = peer.ok("stream 0");
    peer.ok(&format!("fill {there} {MIB} 8 {their_stream}"));
    peer.ok(&format!("synchronize {their_stream}"));
    let number = peer.address(&format!("export_block_number {theirs}"));
    assert_eq!(Machine::exporter_of_number(number), peer.pid());
    let address = map(&ours, ours.import_block_number(number).unwrap());
    assert_eq!(read(&ours, address, 1), [8]);
    // Not those of the process id: another process of a test may have such a block.
    let altered = (0..64).map(|bit| number ^ 1 << bit);
    for altered in altered.filter(|altered| Machine::exporter_of_number(*altered) == peer.pid()) {
        assert!(ours.import_block_number(altered).is_err(), "{altered:#x} for {number:#x}");
    }

    let other = peer.ok(&format!("create_block 0 {MIB}"));
    let number = peer.address(&format!("export_block_number {other}"));
    peer.ok(&format!("release_block {other}"));
    assert_eq!(code(ours.import_block_number(number)), INVALID_HANDLE);
    // Another block takes the descriptor's number, and is not taken for the old one.
    peer.ok(&format!("create_block 0 {MIB}"));
    assert_eq!(code(ours.import_block_number(number)), INVALID_HANDLE);
    peer.kill();
    assert_eq!(code(ours.import_block_number(number)), EXPORTER_GONE);
    assert_eq!(read(&ours, address, 1), [8]);
}

#[test]
fn streams_access_registered_host_memory() {
    let ours = machine("");
    let stream = ours.create_stream(1).unwrap();
    let words: Vec<std::sync::atomic::AtomicU64> = (0..512).map(Into::into).collect();
    let at = Address::new(words.as_ptr() as u64);
    assert_eq!(code(ours.fill(at, 8, 1, stream)), UNKNOWN_ADDRESS);
    // SAFETY: the words outlive the registration, and are only accessed as atomics.
    unsafe { ours.register_host(at, 4096) }.unwrap();
    // SAFETY: refused.
    assert_eq!(code(unsafe { ours.register_host(at.add(8), 8) }), INVALID_VALUE);
    ours.write_value64(stream, at, 77).unwrap();
    let block = ours.allocate(1, 16).unwrap();
    ours.copy(block, at, 16, stream).unwrap();
    ours.synchronize(stream).unwrap();
    assert_eq!(words[0].load(std::sync::atomic::Ordering::Acquire), 77);
    assert_eq!(read(&ours, block, 9)[..9], [77, 0, 0, 0, 0, 0, 0, 0, 1]);
    // A stream waits for what the host writes.
    ours.wait_value64(stream, at.add(8), 100).unwrap();
    assert_eq!(ours.query(stream), Ok(false));
    words[1].store(100, std::sync::atomic::Ordering::Release);
    ours.synchronize(stream).unwrap();
    ours.unregister_host(at).unwrap();
    assert_eq!(code(ours.fill(at, 8, 1, stream)), UNKNOWN_ADDRESS);
    assert_eq!(code(ours.unregister_host(at)), UNKNOWN_ADDRESS);
    assert_eq!(code(ours.unregister_host(block)), UNKNOWN_ADDRESS);
}

#[test]
fn kernel_access_outside_of_pages_fails() {
    let ours: Arc<Machine> = machine("devices=2;peers=none");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 100).unwrap();
    ours.fill(block, 100, 1, stream).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    ours.run_kernel(
        move |memory| {
            memory.store(block.add(8), 4, 0x0a0b_0c0d)?;
            // Behind the block, in its page: only a kernel gets there.
            memory.store(block.add(4095), 1, 5)?;
            send.send((memory.device(), memory.load(block.add(8), 8)?)).expect("the test listens");
            memory.load(block.add(4096), 8).map(drop)
        },
        stream,
    )
    .unwrap();
    assert_eq!(code(ours.synchronize(stream)), ILLEGAL_ADDRESS);
    let seen = receive.recv_timeout(super::support::DEADLINE).unwrap();
    // Four bytes of the store, then four of the fill.
    assert_eq!(seen, (0, 0x0101_0101_0a0b_0c0d));
    assert_eq!(code(ours.fill(block, 101, 0, stream)), 8, "copies are checked against the block");

    let other = ours.create_stream(1).unwrap();
    ours.run_kernel(move |memory| memory.load(block, 1).map(drop), other).unwrap();
    assert_eq!(code(ours.synchronize(other)), ILLEGAL_ADDRESS, "no peer access");
    ours.run_kernel(move |memory| memory.load(block.add(1), 2).map(drop), stream).unwrap();
    assert_eq!(code(ours.synchronize(stream)), 9, "misaligned");
    let read_only = ours.create_block(0, MIB).unwrap();
    let address = map(&ours, read_only);
    ours.set_access(address, MIB, 0, Some(Access::ReadOnly)).unwrap();
    ours.run_kernel(move |memory| memory.store(address, 1, 0), stream).unwrap();
    assert_eq!(code(ours.synchronize(stream)), READ_ONLY);
}

#[test]
fn event_opens_by_descriptor() {
    let ours = machine("");
    let peer = Peer::spawn("");
    let (theirs, their_stream) = (peer.ok("event 0"), peer.ok("stream 0"));
    let (_, fd) = peer.ok_with(&format!("export_event_fd {theirs}"), None);
    let opened = ours.open_event_fd(fd.expect("a descriptor came"), 1).unwrap();
    assert_eq!(ours.query_event(opened), Ok(true), "never recorded");
    let gate = peer.address("allocate 0 8");
    peer.ok(&format!("wait_value {their_stream} {gate} 1"));
    peer.ok(&format!("record {theirs} {their_stream}"));
    assert_eq!(ours.query_event(opened), Ok(false));
    let stream = ours.create_stream(1).unwrap();
    ours.wait(stream, opened).unwrap();
    assert_eq!(ours.query(stream), Ok(false));
    let other = peer.ok("stream 0");
    peer.ok(&format!("write_value {other} {gate} 1"));
    ours.synchronize(stream).unwrap();
    assert_eq!(ours.query_event(opened), Ok(true));
    let nothing = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(code(ours.open_event_fd(nothing.into(), 0)), INVALID_HANDLE);
}

#[test]
fn grant_access_without_peer_access_permits_copies() {
    let ours = machine("devices=2;peers=none");
    let address = map(&ours, ours.create_block(0, MIB).unwrap());
    assert_eq!(code(ours.set_access(address, MIB, 1, Some(Access::ReadWrite))), NO_PEER_ACCESS);
    ours.grant_access(address, MIB, 1, Some(Access::ReadWrite)).unwrap();
    let stream = ours.create_stream(1).unwrap();
    fill(&ours, address, MIB, 3, stream).unwrap();
    assert_eq!(read(&ours, address, 1), [3]);
}
