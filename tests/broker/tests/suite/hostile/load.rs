//! Many connections, many requests, and peers that do not read.

use std::time::{Duration, Instant};

use device_ipc_broker_tests::{
    Connection, DESCRIPTORS, Forged, FromExporter, PINNING, Received, ToExporter, agent, eventually,
    open_request, within,
};

use super::{HONEST, Scene};

#[test]
fn thousand_connections_keep_no_importer_out() {
    let mut scene = Scene::new(PINNING);
    let socket = String::from_utf8(scene.forged.address().to_vec()).expect("a name of text");
    // From a few processes, each of which needs one.
    let mut greedy: Vec<_> = (0..4).map(|_| agent!(PINNING)).collect();
    for process in &mut greedy {
        process.ok(&format!("connect-many {socket} 250"));
    }
    scene.serves_honest_peers();
    let most = scene.before.of_kind("socket") + 4 * 8 + 8;
    let sockets = scene.exporter.census().of_kind("socket");
    assert!(sockets <= most, "{sockets} sockets for four processes");
    // From many.
    let mut swarm = agent!(PINNING);
    swarm.ok(&format!("swarm {socket} 8 processes=125"));
    scene.serves_honest_peers();
    let sockets = scene.exporter.census().of_kind("socket");
    assert!(sockets <= scene.before.of_kind("socket") + 256 + 8, "{sockets} sockets");
    scene.honest.ok("touch x");
    assert_eq!(scene.honest.take_events(), Vec::<String>::new());
    swarm.ok("end-swarm");
    greedy.clear();
    scene.is_unharmed();
}

#[test]
fn exporter_without_free_descriptors_serves_its_connections() {
    let mut scene = Scene::new(PINNING);
    let socket = String::from_utf8(scene.forged.address().to_vec()).expect("a name of text");
    // The machine's memory files lie above; what the library opens takes the lowest.
    let room = scene.before.all_descriptors() + 20;
    scene.exporter.ok(&format!("limit-descriptors {room}"));
    let mut swarm = agent!(PINNING);
    swarm.ok(&format!("swarm {socket} 4 processes=20"));
    let second = scene.forged.finish();
    within(HONEST, "an open over a connection that there is", || {
        scene.honest.ok(&format!("open y {second}"));
    });
    scene.honest.ok("drop y");
    swarm.ok("end-swarm");
    scene.is_unharmed();
}

#[test]
fn peer_that_never_reads_is_disconnected() {
    for machine in [PINNING, DESCRIPTORS] {
        let mut scene = Scene::new(machine);
        let connection = scene.greeted();
        let open = postcard::to_stdvec(&open_request(&scene.forged, 1)).expect("it encodes");
        let until = Instant::now() + Duration::from_secs(20);
        let mut sent = 0;
        while !connection.is_closed() && Instant::now() < until {
            match connection.try_send_bytes(&open) {
                Ok(()) => sent += 1,
                Err(rustix::io::Errno::AGAIN) => std::thread::yield_now(),
                Err(_) => break,
            }
        }
        assert!(connection.is_closed(), "{machine}: still open after {sent} opens without a read");
        drop(connection);
        // The honest one's own backend is another one here.
        eventually("holders", 1, || scene.exporter.holders("x"));
        eventually("what the exporter has", scene.before.clone(), || scene.exporter.census());
        scene.honest.ok("touch x");
    }
}

#[test]
fn request_flood_delays_no_importer_for_long() {
    let mut scene = Scene::new(PINNING);
    let connections: Vec<_> = (0..4).map(|_| scene.greeted()).collect();
    let list = postcard::to_stdvec(&ToExporter::List { request: 1, after: u64::MAX }).expect("it encodes");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for connection in &connections {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    if connection.try_send_bytes(&list).is_err() {
                        // Reads as it goes, so that it is not cut off for that.
                        while !matches!(connection.receive(Duration::from_millis(1)), Received::Nothing) {
                            if connection.is_closed() {
                                return;
                            }
                        }
                    }
                }
            });
        }
        let mut newcomer = agent!(PINNING);
        for _ in 0..10 {
            within(HONEST, "an honest open", || newcomer.ok(&format!("open y {}", scene.descriptor)));
            newcomer.ok("drop y");
            newcomer.ok("close-unused 5000");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    drop(connections);
    scene.is_unharmed();
}

#[test]
fn constant_reconnects_delay_no_importer_for_long() {
    let mut scene = Scene::new(PINNING);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let address = scene.forged.address().to_vec();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    // Also where it is turned away.
                    let _ = Connection::to(&address);
                }
            });
        }
        for _ in 0..10 {
            scene.serves_honest_peers();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    scene.is_unharmed();
}

/// An importer of many exports receives all notifications of drops, however late it reads: closing its connection would end
/// leases of memory that it still uses.
#[test]
fn late_reader_receives_every_drop_and_keeps_its_leases() {
    const EXPORTS: u64 = 2000;
    let mut scene = Scene::new(PINNING);
    let connection = scene.greeted();
    for index in 0..EXPORTS {
        let descriptor = scene.exporter.share(&format!("d{index} 64"));
        connection.send(&open_request(&Forged::of(&descriptor), index)).expect("it listens");
        assert!(matches!(connection.receive_message(), FromExporter::Opened(_)));
    }
    for index in 0..EXPORTS {
        scene.exporter.ok(&format!("drop d{index}"));
    }
    for _ in 0..EXPORTS {
        let message = connection.receive_message();
        assert!(matches!(message, FromExporter::Dropped { .. }), "{message:?}");
    }
    assert!(!connection.is_closed());
    drop(connection);
    eventually("what the exporter has", scene.before.clone(), || scene.exporter.census());
}
