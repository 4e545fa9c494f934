//! Costs of bundles, rings and messages.

use std::io::BufRead as _;
use std::sync::Arc;

use crate::roles::start;
use device_ipc::mock::MockBackend;
use device_ipc::{
    Buffer, Channel, Descriptor, Dtype, Export, Ipc, Message, Ring, RingReader, Stream, TensorLayout,
};
use device_ipc_test_process::alone;

use super::{Counted, HERE, PATIENCE, cost, settle};

/// Allocations of a bundle.
const BLOCKS: u64 = 100;

/// The names, shapes and strides of a thousand tensors.
#[test]
fn cost_of_bundle() {
    alone!();
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (tensors, block) = (1000_u64, Arc::new(ipc.allocate(0, 64_000).expect("memory")));
    let names: Vec<String> = (0..tensors).map(|index| format!("layer.{index}.weight")).collect();
    let make = |names: Vec<String>| {
        let mut bundle = ipc.tensors();
        let memory = bundle.memory(block.clone());
        for (index, name) in names.into_iter().enumerate() {
            let layout = TensorLayout::contiguous(Dtype::F32, [2, 2, 2, 2]).expect("a layout");
            bundle.tensor(name, memory, index as u64 * 64, layout).expect("it fits");
        }
        ipc.share_all(bundle).start().expect("shared")
    };
    let kept = make(names.clone());
    let (again, bundle) = counted.cost(|| make(names));
    assert_eq!((again.driver.len(), again.requests), (0, 0), "the memory is shared already: {again:?}");
    assert!(again.allocations < 100, "{} allocations for {tensors} tensors", again.allocations);
    let (written, bytes) = counted.cost(|| bundle.descriptor().to_bytes());
    assert_eq!(written.allocations, 1, "one buffer");
    let (read, descriptor) = counted.cost(|| Descriptor::from_bytes(&bytes).expect("it is read back"));
    assert_eq!(descriptor.tensors().len() as u64, tensors);
    assert!(read.allocations < 40, "{} allocations for {tensors} tensors", read.allocations);
    drop((kept, bundle));
}

/// A bundle of these blocks, with a tensor in each.
fn bundle_of(ipc: &Ipc, blocks: &[Arc<Buffer>]) -> Export {
    let mut bundle = ipc.tensors();
    for (index, block) in blocks.iter().enumerate() {
        let memory = bundle.memory(block.clone());
        let layout = TensorLayout::contiguous(Dtype::F32, [16]).expect("a layout");
        bundle.tensor(format!("layer.{index}.weight"), memory, 0, layout).expect("it fits");
    }
    ipc.share_all(bundle).start().expect("shared")
}

fn blocks(ipc: &Ipc) -> Vec<Arc<Buffer>> {
    (0..BLOCKS).map(|_| Arc::new(ipc.allocate(0, 4096).expect("memory"))).collect()
}

/// A repeated hand-over costs the same for one allocation as for many, apart from the caller's own values for each.
#[test]
fn cost_of_bundle_with_many_allocations() {
    alone!();
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let blocks = blocks(ipc);
    let (first, kept) = counted.cost(|| bundle_of(ipc, &blocks));
    assert_eq!(first.driver, [("range_of", BLOCKS), ("export", BLOCKS)], "the driver is asked once for each");
    let (again, bundle) = counted.cost(|| bundle_of(ipc, &blocks));
    assert_eq!((again.driver, again.requests), (vec![], 0), "exports keep all of them");
    // The names, and the lists of what the caller gives.
    assert!(again.allocations < BLOCKS + 40, "{} allocations", again.allocations);
    let (read, _) = counted.cost(|| Descriptor::from_bytes(&bundle.descriptor().to_bytes()));
    assert!(read.allocations < 40, "{} allocations for {BLOCKS} regions", read.allocations);
    drop((kept, bundle));

    let process = start(HERE, "bundler", &[]);
    let bundles: Vec<Descriptor> = (0..3).map(|_| process.line(|line| line.parse().ok())).collect();
    let open = |bundle| ipc.open(bundle).at_home().expect("opened");
    let (first, mapping) = counted.cost(|| open(&bundles[0]));
    assert_eq!(first.driver, [("range_of", BLOCKS), ("open", BLOCKS)], "each is opened once");
    assert_eq!(first.requests, 1);
    let (another, second) = counted.cost(|| open(&bundles[1]));
    assert_eq!((another.driver, another.requests), (vec![], 1), "another bundle of the same memory");
    assert!(another.allocations < 30, "{} allocations", another.allocations);
    drop(mapping);
    let (next, third) = counted.cost(|| open(&bundles[2]));
    assert_eq!((next.driver, next.requests), (vec![], 1), "and the next, where the first has gone");
    assert!(next.allocations < 30, "{} allocations", next.allocations);
    let (same, fourth) = counted.cost(|| open(&bundles[2]));
    assert_eq!((same.driver, same.requests), (vec![], 0), "a bundle that is open");
    drop((second, third, fourth));
    settle();
    process.finish();
}

#[test]
fn cost_of_ring_hand_over() {
    alone!();
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let stream = ipc.create_stream(0).expect("a stream");
    let mut ring = ring_of(ipc);
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream).expect("joined");
    for _ in 0..4 {
        hand_over_by_hosts(&mut ring, &mut reader, &stream);
    }
    let (by_hosts, ()) = counted.cost(|| hand_over_by_hosts(&mut ring, &mut reader, &stream));
    assert_eq!(by_hosts, cost(&[], 0, 0), "by hosts");
    let mut by_streams = || {
        ring.write(&stream).expect("written").publish().expect("published");
        reader.next_ahead(&stream).expect("taken").release(&stream).expect("released");
    };
    // The device gets to know the pages.
    by_streams();
    stream.synchronize().expect("done");
    let (by_streams, ()) = counted.cost(by_streams);
    let waits = by_streams.driver.iter().filter(|(name, _)| *name == "wait_value").map(|(_, count)| count);
    assert!(waits.sum::<u64>() <= 1, "a wait for the publication, if it has not come: {by_streams:?}");
    let rest: Vec<_> = by_streams.driver.iter().filter(|(name, _)| *name != "wait_value").copied().collect();
    assert_eq!(
        rest,
        [("write_value", 4)],
        "the publication and the release, each with the order of the process's own streams; no host waits"
    );
    assert_eq!(by_streams.requests, 0);
    stream.synchronize().expect("done");
}

pub(super) fn ring_of(ipc: &Ipc) -> Ring {
    ipc.ring(ipc.allocate(0, 4096).expect("memory")).start().expect("a ring")
}

pub(super) fn hand_over_by_hosts(ring: &mut Ring, reader: &mut RingReader, stream: &Stream) {
    ring.wait_writable(PATIENCE).expect("released");
    ring.write(stream).expect("written").publish_now().expect("published");
    reader.next(PATIENCE).expect("taken").expect("open").release_now().expect("released");
}

/// Both sides of a channel, in this process.
pub(super) fn channel(ipc: &Ipc) -> (Channel, Channel) {
    let name = format!("counts-{}", std::process::id());
    let listener = ipc.listen(&name).start().expect("it listens");
    let connecting = std::thread::spawn({
        let ipc = ipc.clone();
        move || ipc.connect(&name).timeout(PATIENCE).start()
    });
    let far = listener.accept(PATIENCE).expect("accepted");
    (connecting.join().expect("no panic").expect("connected"), far)
}

#[test]
fn cost_of_message() {
    alone!();
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (near, far) = channel(ipc);
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let export = ipc.share(block).start().expect("shared");
    let send = |channel: &Channel| {
        channel.send(Message::new().bytes(b"layer").export(&export), PATIENCE).expect("sent");
    };
    // Buffers and tables are as large as they have to be.
    for _ in 0..20 {
        send(&near);
        drop(far.receive(PATIENCE).expect("received"));
    }
    let (sent, ()) = counted.cost(|| send(&near));
    assert_eq!(sent, cost(&[], 0, 4), "the parts, their grants, their list, the bytes of the descriptor");
    let (received, message) = counted.cost(|| far.receive(PATIENCE).expect("received"));
    assert_eq!(received, cost(&[], 0, 6), "the bytes, the parts and their list, the descriptor");
    let (opened, mapping) = counted.cost(|| message.exports()[0].open().at_home().expect("opened"));
    assert_eq!((opened.driver, opened.requests), (vec![], 0), "opening it");
    drop((mapping, message));
    let (bytes, ()) = counted.cost(|| near.send(Message::new().bytes(b"bytes"), PATIENCE).expect("sent"));
    assert_eq!(bytes, cost(&[], 0, 0), "bytes alone");
    let (received, _) = counted.cost(|| far.receive(PATIENCE).expect("received"));
    assert_eq!(received, cost(&[], 0, 1), "the bytes alone");
}

/// Bundles of the same memory.
pub(super) fn run_bundler() {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let blocks = blocks(&ipc);
    let bundles: Vec<_> = (0..3).map(|_| bundle_of(&ipc, &blocks)).collect();
    bundles.iter().for_each(|bundle| println!("{}", bundle.descriptor()));
    let ended = std::io::stdin().lock().lines().next();
    assert!(ended.is_none(), "the test only closes the input");
}
