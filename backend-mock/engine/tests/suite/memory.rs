//! Memory shared between two processes: open, close, and rejected handles.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

use super::support::{DEADLINE, Peer, code, machine};
use device_ipc_mock_engine::{Access, Address, EngineError, HANDLE_BYTES, Machine, MachineConfig, Part};
use device_ipc_test_process::{hex, unhex};

const INVALID_HANDLE: i32 = 10;
const OWN_PROCESS: i32 = 11;
const PERMISSION_DENIED: i32 = 13;
const NO_PEER_ACCESS: i32 = 14;
const READ_ONLY: i32 = 15;

#[test]
fn bytes_handle_shares_writes_both_ways() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 100).unwrap();
    ours.fill(block, 100, 7, stream).unwrap();
    ours.synchronize(stream).unwrap();

    let handle = hex(&ours.export_bytes(block).unwrap());
    let (theirs, their_stream) = (peer.address(&format!("open {handle} 0 rw")), peer.ok("stream 0"));
    assert_eq!(peer.ok(&format!("read {theirs} 100 {their_stream}")), "07".repeat(100));

    peer.ok(&format!("add {theirs} 50 2 {their_stream}"));
    peer.ok(&format!("synchronize {their_stream}"));
    let seen = ours.read_to_host(block, 100, stream).unwrap();
    assert_eq!((seen[49], seen[50]), (9, 7));
}

#[test]
fn descriptor_handle_shares_writes_both_ways() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(1, 64).unwrap();
    ours.fill(block, 64, 1, stream).unwrap();
    ours.synchronize(stream).unwrap();

    let (fd, handle) = ours.export_fd(block).unwrap();
    let handle = hex(&handle);
    assert_eq!(peer.fails(&format!("open {handle} 0 rw")), INVALID_HANDLE);
    let (theirs, _) = peer.ok_with(&format!("open {handle} 0 rw"), Some(fd.as_fd()));
    let their_stream = peer.ok("stream 0");
    peer.ok(&format!("add {theirs} 64 4 {their_stream}"));
    assert_eq!(peer.ok(&format!("read {theirs} 64 {their_stream}")), "05".repeat(64));
    assert_eq!(ours.read_to_host(block, 64, stream).unwrap(), [5; 64]);
}

#[test]
fn second_open_with_same_device_and_access_shares_mapping() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let block = peer.address("allocate 0 4096");
    let handle = unhex(&peer.ok(&format!("export {block}")));
    let open = |device, access| ours.open(&handle, None, device, access).unwrap();
    let first = open(0, Access::ReadWrite);
    assert_eq!(open(0, Access::ReadWrite), first);
    assert_ne!(open(1, Access::ReadWrite), first);
    assert_ne!(open(0, Access::ReadOnly), first);

    let range = ours.range_of(first.add(17)).unwrap();
    assert_eq!((range.base, range.size, range.device, range.imported), (first, 4096, 0, true));
    ours.close(first).unwrap();
    assert!(ours.range_of(first).is_ok());
    ours.close(first).unwrap();
    assert_eq!(ours.range_of(first), Err(EngineError::UnknownAddress { address: first }));
    assert_eq!(ours.close(first), Err(EngineError::UnknownAddress { address: first }));
}

#[test]
fn last_close_waits_for_streams_of_device() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let block = peer.address("allocate 0 4096");
    let handle = unhex(&peer.ok(&format!("export {block}")));
    let opened = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();
    let (stream, rescue) = (ours.create_stream(0).unwrap(), ours.create_stream(0).unwrap());
    ours.wait_value64(stream, opened, 1).unwrap();
    ours.fill(opened.add(8), 8, 6, stream).unwrap();
    assert_eq!(ours.open(&handle, None, 0, Access::ReadWrite), Ok(opened));
    ours.close(opened).unwrap();
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ours.close(opened).unwrap();
            send.send(()).unwrap();
        });
        assert!(receive.recv_timeout(Duration::from_millis(50)).is_err(), "it waits");
        ours.write_value64(rescue, opened, 1).unwrap();
        receive.recv_timeout(DEADLINE).unwrap();
    });
    assert!(ours.range_of(opened).is_err());
    ours.synchronize(stream).unwrap();
    assert_eq!(peer.ok(&format!("read {} 8 {}", block + 8, peer.ok("stream 0"))), "06".repeat(8));
}

#[test]
fn free_close_and_export_check_owner_of_memory() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let own = ours.allocate(0, 8192).unwrap();
    let handle = unhex(&peer.ok(&format!("export {}", peer.address("allocate 0 4096"))));
    let opened = ours.open(&handle, None, 0, Access::ReadWrite).unwrap();
    assert_eq!(ours.free(opened), Err(EngineError::Imported { address: opened }));
    assert_eq!(ours.export_bytes(opened), Err(EngineError::Imported { address: opened }));
    assert_eq!(ours.close(own), Err(EngineError::NotImported { address: own }));
    let inside = own.add(1);
    assert_eq!(ours.export_bytes(inside), Err(EngineError::NotBase { address: inside, base: own }));
    assert_eq!(ours.free(inside), Err(EngineError::NotBase { address: inside, base: own }));
    let host = Address::new(&raw const handle as u64);
    assert_eq!(ours.range_of(host), Err(EngineError::UnknownAddress { address: host }));
    assert!(ours.range_of(Address::new(0)).is_err());
}

#[test]
fn open_of_own_handle_fails() {
    let ours = machine("");
    let block = ours.allocate(0, 1).unwrap();
    let handle = ours.export_bytes(block).unwrap();
    assert_eq!(ours.open(&handle, None, 0, Access::ReadWrite), Err(EngineError::OwnProcess));
    let (fd, handle) = ours.export_fd(block).unwrap();
    assert_eq!(code(ours.open(&handle, Some(fd), 0, Access::ReadWrite)), OWN_PROCESS);
}

#[test]
fn garbage_is_rejected_as_invalid_handle() {
    let ours = machine("");
    let mut state = 0x1234_5678_9abc_def0_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..500 {
        let length = if round % 2 == 0 { HANDLE_BYTES } else { (random() % 130) as usize };
        let garbage: Vec<u8> = (0..length).map(|_| random() as u8).collect();
        assert_eq!(code(ours.open(&garbage, None, 0, Access::ReadWrite)), INVALID_HANDLE);
        assert_eq!(code(ours.open_event(&garbage, 0)), INVALID_HANDLE);
    }
    assert_eq!(code(ours.open(&[0; HANDLE_BYTES], None, 0, Access::ReadWrite)), INVALID_HANDLE);

    let peer = Peer::spawn("");
    let handle = unhex(&peer.ok(&format!("export {}", peer.address("allocate 0 4096"))));
    for length in 0..HANDLE_BYTES {
        assert_eq!(code(ours.open(&handle[..length], None, 0, Access::ReadWrite)), INVALID_HANDLE);
    }
    for bit in 0..HANDLE_BYTES * 8 {
        let mut changed = handle.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(code(ours.open(&changed, None, 0, Access::ReadWrite)), INVALID_HANDLE);
    }
    assert_eq!(code(ours.open_event(&handle, 0)), INVALID_HANDLE);
    let file = some_file();
    assert_eq!(code(ours.open(&handle, Some(file), 0, Access::ReadWrite)), INVALID_HANDLE);
    let (_, descriptor) = peer.ok_with(&format!("export_fd {}", peer.address("allocate 0 4096")), None);
    assert_eq!(code(ours.open(&handle, descriptor, 0, Access::ReadWrite)), INVALID_HANDLE);
}

#[test]
fn foreign_descriptor_is_rejected() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let first = peer.address("allocate 0 4096");
    let second = peer.address("allocate 0 4096");
    let handle = unhex(&peer.ok_with(&format!("export_fd {first}"), None).0);
    let (_, other) = peer.ok_with(&format!("export_fd {second}"), None);
    assert_eq!(code(ours.open(&handle, other, 0, Access::ReadWrite)), INVALID_HANDLE);
    let file = some_file();
    assert_eq!(code(ours.open(&handle, Some(file), 0, Access::ReadWrite)), INVALID_HANDLE);
}

fn some_file() -> OwnedFd {
    File::open("/proc/self/stat").unwrap().into()
}

#[test]
fn stale_handle_opens_replacement_unless_generations_checked() {
    let (ours, careful, peer) = (machine(""), machine("check_generation=on"), Peer::spawn(""));
    let first = peer.address("allocate 0 4096");
    let stale = peer.ok(&format!("export {first}"));
    peer.ok(&format!("free {first}"));
    let open = |ours: &device_ipc_mock_engine::Machine| ours.open(&unhex(&stale), None, 0, Access::ReadWrite);
    assert_eq!(code(open(&ours)), INVALID_HANDLE);

    let second = peer.address("allocate 0 4096");
    assert_eq!(second, first, "a new block of the same size lands at the same address");
    assert_ne!(peer.ok(&format!("export {second}")), stale);
    let their_stream = peer.ok("stream 0");
    peer.ok(&format!("fill {second} 4096 238 {their_stream}"));
    peer.ok(&format!("synchronize {their_stream}"));

    let opened = open(&ours).unwrap();
    let stream = ours.create_stream(0).unwrap();
    assert_eq!(ours.read_to_host(opened, 1, stream).unwrap(), [238]);
    assert_eq!(code(open(&careful)), INVALID_HANDLE);
}

#[test]
fn generations_are_unique_and_optional() {
    let (numbered, unnumbered) = (machine(""), machine("generations=off"));
    let first = numbered.allocate(0, 1).unwrap();
    let generation = numbered.range_of(first).unwrap().generation.unwrap();
    numbered.free(first).unwrap();
    let second = numbered.allocate(0, 1).unwrap();
    assert_eq!(second, first);
    assert!(numbered.range_of(second).unwrap().generation.unwrap() > generation);
    let block = unnumbered.allocate(0, 1).unwrap();
    assert_eq!(unnumbered.range_of(block).unwrap().generation, None);
}

#[test]
fn peer_matrix_is_physical_and_directed() {
    let ours = machine("devices=2;visible=1,0;peers=1>0");
    let peer = Peer::spawn("devices=2");
    let open = |home: usize, device| {
        let block = peer.address(&format!("allocate {home} 4096"));
        let handle = unhex(&peer.ok(&format!("export {block}")));
        ours.open(&handle, None, device, Access::ReadWrite)
    };
    assert_eq!(ours.devices()[0].physical, 1);
    assert!(open(1, 0).is_ok(), "at home");
    assert!(open(0, 1).is_ok(), "at home");
    assert!(open(0, 0).is_ok(), "device 1 reaches device 0");
    assert_eq!(open(1, 1), Err(EngineError::NoPeerAccess { from: 0, to: 1 }));
    assert_eq!(open(1, 2), Err(EngineError::InvalidDevice { ordinal: 2, count: 2 }));
    assert_eq!((ours.peer_access(0, 1), ours.peer_access(1, 0)), (Ok(true), Ok(false)));
}

#[test]
fn memory_of_hidden_device_opens_on_peer() {
    let ours = machine("devices=3;visible=2;peers=2>0");
    let peer = Peer::spawn("devices=3");
    let handle =
        |home: usize| unhex(&peer.ok(&format!("export {}", peer.address(&format!("allocate {home} 4096")))));
    assert!(ours.open(&handle(0), None, 0, Access::ReadWrite).is_ok());
    assert_eq!(code(ours.open(&handle(1), None, 0, Access::ReadWrite)), NO_PEER_ACCESS);
}

#[test]
fn read_only_mapping_rejects_only_writes() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let block = peer.address("allocate 0 4096");
    let handle = unhex(&peer.ok(&format!("export {block}")));
    let opened = ours.open(&handle, None, 0, Access::ReadOnly).unwrap();
    let own = ours.allocate(0, 4096).unwrap();
    let stream = ours.create_stream(0).unwrap();
    let refused = || assert_eq!(code(ours.synchronize(stream)), READ_ONLY);
    ours.fill(opened, 1, 1, stream).unwrap();
    refused();
    ours.copy(opened, own, 8, stream).unwrap();
    refused();
    ours.add_u8(opened, 1, 1, stream).unwrap();
    refused();
    ours.add_f32(opened, 1, 1.0, stream).unwrap();
    refused();
    ours.write_value64(stream, opened, 1).unwrap();
    refused();
    ours.write_from_host(opened, &[1], stream).unwrap();
    refused();
    ours.copy(own, opened, 4096, stream).unwrap();
    ours.wait_value64(stream, opened, 0).unwrap();
    assert_eq!(ours.read_to_host(opened, 4096, stream).unwrap(), [0; 4096]);
    let line = maps_line(opened.get());
    assert!(line.contains(" r--s "), "mapped without the right to write: {line}");
}

fn maps_line(address: u64) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find(|line| line.starts_with(&format!("{address:x}-"))).expect("it is mapped").to_owned()
}

#[test]
fn several_allocations_open_contiguously() {
    let (ours, peer) = (machine(""), Peer::spawn(""));
    let their_stream = peer.ok("stream 0");
    let handles: Vec<_> = (1..=3)
        .map(|value| {
            let block = peer.address("allocate 0 4096");
            peer.ok(&format!("fill {block} 4096 {value} {their_stream}"));
            unhex(&peer.ok(&format!("export {block}")))
        })
        .collect();
    peer.ok(&format!("synchronize {their_stream}"));
    let parts = || handles.iter().rev().map(|handle| Part { handle, fd: None }).collect();
    let base = ours.open_contiguous(parts(), 0, Access::ReadWrite).unwrap();
    let stream = ours.create_stream(0).unwrap();
    let all = ours.read_to_host(base, 3 * 4096, stream).unwrap();
    assert_eq!((all[0], all[4096], all[2 * 4096]), (3, 2, 1));
    ours.fill(base.add(4095), 2, 9, stream).unwrap();
    ours.synchronize(stream).unwrap();
    let second = base.add(4096);
    assert_eq!(ours.range_of(second).unwrap().base, second);
    assert_eq!(ours.close(second), Err(EngineError::NotBase { address: second, base }));
    assert_eq!(
        ours.fill(base, 3 * 4096 + 1, 0, stream),
        Err(EngineError::OutOfRange { address: base, len: 3 * 4096 + 1, base, size: 4096 })
    );
    ours.close(base).unwrap();
    assert!(ours.range_of(second).is_err());
    assert!(ours.open_contiguous(Vec::new(), 0, Access::ReadWrite).is_err());

    let short = unhex(&peer.ok(&format!("export {}", peer.address("allocate 0 100"))));
    let gap = [&short, &handles[0]].map(|handle| Part { handle, fd: None });
    assert!(matches!(
        ours.open_contiguous(gap.into(), 0, Access::ReadWrite),
        Err(EngineError::InvalidValue { .. })
    ));
}

#[test]
fn open_and_close_leak_no_descriptor() {
    let exporter = Peer::spawn("");
    let revoking = Peer::spawn("lifetime=revoking");
    let importer = Peer::spawn("");
    let count = |peer: &Peer| peer.ok("descriptors");
    let before = count(&importer);
    for exporter in [&exporter, &revoking] {
        let block = exporter.address("allocate 0 65536");
        let theirs = count(exporter);
        for _ in 0..20 {
            let handle = exporter.ok(&format!("export {block}"));
            let opened = importer.ok(&format!("open {handle} 0 rw"));
            importer.ok(&format!("close {opened}"));
            let (handle, fd) = exporter.ok_with(&format!("export_fd {block}"), None);
            let fd = fd.expect("it comes with the handle");
            let (opened, _) = importer.ok_with(&format!("open {handle} 1 ro"), Some(fd.as_fd()));
            importer.ok(&format!("close {opened}"));
            importer.fails(&format!("open {} 0 rw", "00".repeat(64)));
        }
        assert_eq!(count(exporter), theirs);
        exporter.ok(&format!("free {block}"));
    }
    assert_eq!(count(&importer), before);
}

#[test]
fn allocation_beyond_free_memory_fails() {
    let ours = machine("devices=1;memory=1MiB");
    assert_eq!(ours.memory_info(0), Ok((1 << 20, 1 << 20)));
    let half = ours.allocate(0, 1 << 19).unwrap();
    let rest = ours.allocate(0, 1 << 19).unwrap();
    assert_eq!(rest, half.add(1 << 19), "neighbours");
    assert_eq!(ours.allocate(0, 1), Err(EngineError::OutOfMemory { device: 0, requested: 4096, free: 0 }));
    ours.free(half).unwrap();
    assert_eq!(ours.memory_info(0), Ok((1 << 19, 1 << 20)));
    assert_eq!(ours.allocate(0, 1 << 19), Ok(half));
    assert!(matches!(ours.allocate(0, 0), Err(EngineError::InvalidValue { .. })));
    assert!(matches!(ours.allocate(0, u64::MAX), Err(EngineError::OutOfMemory { .. })));
}

#[test]
fn open_by_another_user_is_not_permitted() {
    let ours = machine("");
    let block = ours.allocate(0, 4096).unwrap();
    let handle = hex(&ours.export_bytes(block).unwrap());
    let nobody = 65534;
    match Peer::spawn_as(nobody, "") {
        Ok(peer) => assert_eq!(peer.fails(&format!("open {handle} 0 rw")), PERMISSION_DENIED),
        Err(error) => eprintln!("skipped, no process of another user can be started: {error}"),
    }
}

#[test]
fn soft_descriptor_limit_does_not_limit_allocations() {
    let (exporter, importer) = (Peer::spawn("lifetime=revoking"), Peer::spawn(""));
    exporter.ok("limit 100");
    importer.ok("limit 100");
    for _ in 0..120 {
        let handle = exporter.ok(&format!("export {}", exporter.address("allocate 0 4096")));
        importer.ok(&format!("open {handle} 0 rw"));
    }
}

#[test]
fn aligned_allocation_wastes_no_addresses() {
    let machine = machine("devices=1;memory=64MiB");
    let small = machine.allocate(0, 4096).expect("memory");
    let huge = machine.allocate_aligned(0, 4 << 20, 2 << 20).expect("memory");
    assert!(huge.get().is_multiple_of(2 << 20));
    // The gap before it is still there for others.
    let next = machine.allocate(0, 4096).expect("memory");
    assert_eq!(next.get(), small.get() + 4096);
    assert_eq!(code(machine.allocate_aligned(0, 4096, 3 << 20)), 2);
    machine.free(huge).expect("freed");
    assert!(machine.is_device_address(huge), "the addresses stay reserved for the device");
    assert!(!machine.is_device_address(Address::new(&raw const machine as u64)));
    assert_eq!(machine.allocate_aligned(0, 4 << 20, 2 << 20), Ok(huge));
}

#[test]
fn free_without_waiting_fails_queued_work() {
    let machine = machine("devices=1");
    let stream = machine.create_stream(0).expect("a stream");
    let block = machine.allocate(0, 4096).expect("memory");
    let (go, wait) = mpsc::channel::<()>();
    machine
        .host_fn(Box::new(move || wait.recv_timeout(DEADLINE).expect("the test sends")), stream)
        .expect("queued");
    machine.fill(block, 4096, 7, stream).expect("queued");
    machine.free_without_waiting(block).expect("freed while the stream waits");
    go.send(()).expect("the stream waits");
    assert_eq!(code(machine.synchronize(stream)), 17);
}

#[test]
fn own_handles_open_if_machine_allows() {
    let mut config = MachineConfig::from_spec("latency=0;lifetime=revoking").expect("a machine");
    config.own_handles = true;
    let machine = Machine::new(config);
    let stream = machine.create_stream(0).expect("a stream");
    let block = machine.allocate(0, 4096).expect("memory");
    let handle = machine.export_bytes(block).expect("a handle");
    let again = machine.open(&handle, None, 0, Access::ReadWrite).expect("opened");
    assert_ne!(again, block);
    machine.fill(again, 4096, 9, stream).expect("queued");
    assert_eq!(machine.read_to_host(block, 4096, stream), Ok(vec![9; 4096]));
    machine.unexport(block).expect("withdrawn");
    machine.fill(again, 4096, 1, stream).expect("queued");
    assert_eq!(code(machine.synchronize(stream)), 16);
    machine.close_without_waiting(again).expect("closed");
    assert_eq!(code(machine.close_without_waiting(block)), 7);
    machine.free(block).expect("freed");
}

#[test]
fn fill_with_zero_clears_exactly_its_range() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let len = 3 << 20;
    let block = ours.allocate(0, len).unwrap();
    ours.fill(block, len, 7, stream).unwrap();
    ours.fill(block.add(1), len - 2, 0, stream).unwrap();
    let bytes = ours.read_to_host(block, len, stream).unwrap();
    assert_eq!((bytes[0], bytes[len as usize - 1]), (7, 7));
    assert!(bytes[1..len as usize - 1].iter().all(|byte| *byte == 0));
}

#[test]
fn separate_exports_are_revoked_separately() {
    let mut config = MachineConfig::from_spec("latency=0;lifetime=revoking").expect("a machine");
    config.own_handles = true;
    let machine = Machine::new(config);
    let stream = machine.create_stream(0).expect("a stream");
    let block = machine.allocate(0, 4096).expect("memory");
    let (first, number) = machine.export_separately(block).expect("a handle");
    let (second, other) = machine.export_separately(block).expect("a handle");
    assert!(first != second && number != other);
    let open = |handle: &[u8]| machine.open(handle, None, 0, Access::ReadWrite);
    let (one, two) = (open(&first).expect("opened"), open(&second).expect("opened"));
    assert_ne!(one, two);
    machine.unexport_separate(block, number).expect("withdrawn");
    assert_eq!(code(machine.unexport_separate(block, number)), 2);
    assert_eq!(code(open(&first)), 10);
    machine.fill(two, 4096, 5, stream).expect("queued");
    machine.synchronize(stream).expect("the other one stands");
    machine.fill(one, 4096, 1, stream).expect("queued");
    assert_eq!(code(machine.synchronize(stream)), 16);
    // The number is used again, and the old handle stays stale.
    let (third, again) = machine.export_separately(block).expect("a handle");
    assert_eq!(again, number);
    assert_eq!(code(open(&first)), 10);
    open(&third).expect("opened");
    machine.unexport(block).expect("all withdrawn");
    assert_eq!(code(open(&second)), 10);
    assert_eq!(code(open(&third)), 10);
    let numbers: Vec<_> = (0..254).map(|_| machine.export_separately(block).expect("a handle").1).collect();
    assert_eq!(numbers.len(), 254);
    assert_eq!(code(machine.export_separately(block)), 2);
}
