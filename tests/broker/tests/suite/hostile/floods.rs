//! Processes that may talk to us and do not stop: deadlines hold, and others are served.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use device_ipc_broker_tests::{
    Answer, Connection, DEADLINE, Directory, FakeServer, Forged, FromExporter, Handle, PINNING, Received,
    ToExporter, agent, eventually, open_request, within,
};

use super::{HONEST, Scene};
use crate::impostors::posing;

/// The shortest chunk of a copy, in bytes.
const CHUNK: u64 = 64 << 10;

/// Ends a flood, also where the test fails: its threads are waited for.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// More messages than a socket holds: where this many were sent, the importer reads them.
const READ: u64 = 200;

/// Sends messages that take longer to read than to send, for as long as the importer's socket is open and `stop` is not set:
/// handles that belong to the importer's first request, which it has given up. Reports when the importer reads them.
fn flood(connection: &Connection, stop: &AtomicBool, read: &Sender<()>) {
    let sent = AtomicU64::new(0);
    let handle = Handle { allocation: 1, kind: 1, bytes: Vec::new(), fds: 0, size: 1, generation: None };
    let message = FromExporter::Handles { request: 1, handles: vec![handle; 2000] };
    let message = postcard::to_stdvec(&message).expect("it encodes");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    match connection.try_send_bytes(&message) {
                        Ok(()) if sent.fetch_add(1, Ordering::Relaxed) == READ => {
                            let _ = read.send(());
                        }
                        Ok(()) | Err(rustix::io::Errno::AGAIN) => {}
                        Err(_) => return,
                    }
                }
            });
        }
    });
}

/// An exporter that answers hello, never answers the first request, and then floods its importer.
fn floods_behind_a_request(
    server: &FakeServer,
    forged: &Forged,
    given_up: &Barrier,
    stop: &AtomicBool,
    read: &Sender<()>,
) {
    let connection = server.accept();
    assert!(matches!(connection.receive(HONEST), Received::Packet(..)), "hello");
    let hello = FromExporter::Hello { protocol: 1, exporter: forged.exporter() };
    connection.send(&hello).expect("it reads");
    given_up.wait();
    flood(&connection, stop, read);
}

#[test]
fn open_at_a_flooding_exporter_keeps_its_deadline() {
    let (server, forged) = posing("flood-open");
    let mut importer = agent!(PINNING);
    let (stop, given_up) = (AtomicBool::new(false), Barrier::new(2));
    let (read, is_read) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| floods_behind_a_request(&server, &forged, &given_up, &stop, &read));
        let _stops = Stops(&stop);
        importer.fails(&format!("open x {} timeout=100", forged.finish()), "Timeout");
        importer.send(&format!("open x {} timeout=500", forged.finish()));
        given_up.wait();
        is_read.recv_timeout(DEADLINE).expect("the importer reads the flood");
        let answer = within(Duration::from_secs(10), "an open of 500 ms", || importer.receive());
        assert!(matches!(answer, Answer::Failed(failure) if failure.kind == "Timeout"));
    });
}

#[test]
fn flooding_exporter_does_not_delay_notices_of_others() {
    let (server, forged) = posing("flood-notices");
    let mut scene = Scene::new(PINNING);
    let (stop, given_up) = (AtomicBool::new(false), Barrier::new(2));
    let (read, is_read) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| floods_behind_a_request(&server, &forged, &given_up, &stop, &read));
        let _stops = Stops(&stop);
        scene.honest.ok("on-gone x");
        scene.honest.fails(&format!("open z {} timeout=100", forged.finish()), "Timeout");
        given_up.wait();
        is_read.recv_timeout(DEADLINE).expect("the poller reads the flood");
        scene.exporter.kill();
        scene.honest.event("gone");
    });
}

#[test]
fn drop_of_a_flooded_channel_returns() {
    let mut listener = agent!(PINNING);
    let mut hostile = agent!(PINNING);
    let name = format!("flooded{}", listener.id());
    listener.ok(&format!("listen {name}"));
    hostile.share("warm 4096");
    hostile.ok("remember-sockets");
    listener.send(&format!("accept {name} c 10000"));
    hostile.ok(&format!("connect {name} c 10000"));
    assert!(matches!(listener.receive(), Answer::Done(_)));
    hostile.ok("flood-channel c 2");
    listener.ok("drop-channel c");
}

/// A request that the driver answers waits for the worker. Where it waits long, its importer waits for room and the exporter
/// keeps a bounded number of requests.
#[test]
fn requests_that_wait_for_the_driver_are_bounded() {
    let mut exporter = agent!(PINNING);
    exporter.ok("allocate memory 4096");
    let forged = Forged::of(&exporter.ok("share-borrowed x memory").parse().expect("a descriptor"));
    let connection = Connection::greeted(&forged);
    connection.send(&open_request(&forged, 1)).expect("it reads");
    let FromExporter::Opened(grant) = connection.receive_message() else { panic!("no lease") };
    // From here on the worker waits for an owner's drop.
    exporter.share("y 4096 blocked=1");
    exporter.ok("drop y");
    let confirm = |request| ToExporter::Confirm { request, lease: grant.lease };
    let until = Instant::now() + Duration::from_secs(2);
    let mut sent = 0;
    while Instant::now() < until && sent < 20_000 {
        let message = postcard::to_stdvec(&confirm(sent)).expect("it encodes");
        match connection.try_send_bytes(&message) {
            Ok(()) => sent += 1,
            Err(rustix::io::Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error} after {sent}"),
        }
    }
    assert!(sent < 5_000, "{sent} requests were taken though none could be answered");
    exporter.ok("unblock y");
    for request in 0..sent {
        assert_eq!(connection.receive_message(), FromExporter::Confirmed { request });
    }
}

/// A callback that is slow, and an importer that opens and releases all the time: the callback is run again when it has
/// returned, not once for each change.
#[test]
fn changes_during_a_callback_are_reported_together() {
    let mut scene = Scene::new(PINNING);
    scene.exporter.ok("on-change x 20");
    let connection = scene.greeted();
    for request in 0..200 {
        connection.send(&open_request(&scene.forged, request)).expect("it reads");
        let FromExporter::Opened(grant) = connection.receive_message() else { panic!("no lease") };
        connection.send(&ToExporter::release(grant.lease)).expect("it reads");
    }
    scene.exporter.share("y 4096");
    within(HONEST, "the end of another export", || scene.exporter.ok("close y 10000"));
    drop(connection);
    scene.is_unharmed();
}

/// Copies that are begun and not taken hold the host memory of copies.
#[test]
fn copies_of_one_importer_leave_room_for_others() {
    let mut exporter = agent!(PINNING);
    // Eight copies of two chunks.
    exporter.ok(&format!("staging-limits {CHUNK} {}", 16 * CHUNK));
    let descriptor = exporter.share(&format!("x {}", 4 * CHUNK));
    let forged = Forged::of(&descriptor);
    // All of them are of one process.
    let hogs: Vec<_> = (0..2).map(|_| Connection::greeted(&forged)).collect();
    for hog in &hogs {
        for request in 0..40 {
            hog.send(&ToExporter::Stage(forged.stage(request, &[]))).expect("it reads");
        }
    }
    assert!(matches!(hogs[0].receive_message(), FromExporter::Staging { .. }));
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open y {descriptor} place=device:0 copying=always"));
    drop(hogs);
    eventually("bytes for copies", 0, || exporter.counter("staging_bytes"));
}

#[test]
fn copies_requested_by_one_importer_are_bounded() {
    let mut exporter = agent!(PINNING);
    exporter.ok(&format!("staging-limits {CHUNK} {}", 2 * CHUNK));
    let forged = Forged::of(&exporter.share(&format!("x {}", 4 * CHUNK)));
    let hog = Connection::greeted(&forged);
    let mut refused = 0;
    let mut count_refusals = || {
        while let Received::Packet(bytes, _) = hog.receive(Duration::ZERO) {
            let answer: FromExporter = postcard::from_bytes(&bytes).expect("it reads well");
            refused += usize::from(matches!(answer, FromExporter::Refused { .. }));
        }
        refused
    };
    for request in 0..400 {
        hog.send(&ToExporter::Stage(forged.stage(request, &[]))).expect("it reads");
        count_refusals();
    }
    eventually("the rest is refused", true, || count_refusals() >= 300);
    assert!(exporter.holders("x") <= 100);
}

/// Sockets that are called like brokers' and do not answer, or whose queues are full, cost a listing no more than its time
/// for all of them.
#[test]
fn listing_beside_silent_brokers_keeps_one_deadline() {
    let mut exporter = agent!(PINNING);
    exporter.share("x 4096");
    let name = |index: u32| format!("device-ipc-{}-silent{index:04x}", std::process::id());
    let servers: Vec<_> = (0..12).map(|index| FakeServer::at(name(index).as_bytes())).collect();
    // Half of them have a full queue.
    let full: Vec<_> = (0..6)
        .flat_map(|index| (0..64).map_while(move |_| Connection::try_to(name(index).as_bytes()).ok()))
        .collect();
    let mut lister = agent!(PINNING);
    let listed = lister.ok("timed-list 700");
    let mut words = listed.split_whitespace();
    let took: u64 = words.next().expect("a time").parse().expect("a number");
    // Twelve time limits are 8400 ms.
    assert!(took < 5000, "{took} ms, of which 700 ms were to be waited");
    let pid = exporter.id().to_string();
    assert!(words.any(|word| word == pid), "the honest exporter is listed: {listed}");
    drop((servers, full));
}

/// Where accept fails for another reason than too many descriptors, the poller waits before it tries again.
#[test]
fn failing_accept_does_not_spin() {
    let mut scene = Scene::new(PINNING);
    let ticks = |pid: u32| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is there");
        let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
        [11, 12].map(|field: usize| fields[field].parse::<u64>().expect("a number")).iter().sum()
    };
    scene.exporter.ok("deny accept4");
    let waiting = Connection::to(scene.forged.address()).expect("it listens");
    let before = ticks(scene.exporter.id());
    std::thread::sleep(Duration::from_millis(800));
    let after = ticks(scene.exporter.id());
    // A tick is 10 ms.
    assert!(after - before < 30, "{} ms of processor time in 800 ms", 10 * (after - before));
    scene.honest.ok("touch x");
    drop(waiting);
}

#[test]
fn normal_exit_removes_the_socket_file() {
    let directory = Directory::new("exit");
    let mut exporter = agent!(PINNING);
    exporter.ok(&directory.ipc());
    exporter.share("x 4096");
    assert_eq!(directory.entries(), 1);
    // A child that exits takes nothing of its parent's.
    exporter.ok("fork-and-exit");
    assert_eq!(directory.entries(), 1);
    assert_eq!(exporter.ask("exit"), Answer::Ended(None));
    assert_eq!(directory.entries(), 0);
}
