//! Peers that take all that they are given: each gets its share, and the rest stays for others.

use std::collections::HashSet;

use device_ipc_broker_tests::{
    Answer, Connection, Forged, FromExporter, PINNING, Refusal, ToExporter, agent, eventually, open_request,
};

/// The limit of open files of a process in which a share is used up.
const FILES: usize = 256;

/// The number of the kind of an error: a peer has its share.
const QUOTA_EXCEEDED: u8 = 11;

/// Takes timelines until the exporter refuses one. Returns the reason, and the number of pages.
fn take_all(connection: &Connection, target: &Forged) -> (String, usize) {
    let mut pages = HashSet::new();
    loop {
        connection.send(&open_request(target, 1)).expect("it reads");
        let FromExporter::Opened(opened) = connection.receive_message() else { panic!("no lease") };
        let timeline = ToExporter::Timeline { request: 2, lease: opened.lease, ready: false };
        connection.send(&timeline).expect("it reads");
        match connection.receive_message() {
            FromExporter::Timeline { page, .. } => pages.insert(page),
            FromExporter::Refused { refusal: Refusal::Failed { kind: QUOTA_EXCEEDED, detail }, .. } => {
                return (detail, pages.len());
            }
            other => panic!("{other:?}"),
        };
    }
}

/// The memory files of counter pages, each with 256 timelines, are an eighth of the limit; one process gets a quarter of them.
#[test]
fn timelines_of_one_importer_leave_descriptors_for_others() {
    let mut exporter = agent!(PINNING);
    exporter.ok("allocate x 4096");
    let descriptor = exporter.share("x 4096 of=x");
    exporter.ok(&format!("limit-descriptors {FILES}"));
    let target = Forged::of(&descriptor);
    // Each connection has a limit too.
    let (mut connections, mut pages) = (Vec::new(), 0);
    let refused = loop {
        let connection = Connection::greeted(&target);
        let (refused, taken) = take_all(&connection, &target);
        pages += taken;
        connections.push(connection);
        if refused.contains("counter pages of at most") {
            break refused;
        }
    };
    let most = FILES / 8 / 4;
    assert_eq!(pages, most, "{refused}");
    assert!(refused.contains(&format!("{most} counter pages of at most {most}")), "{refused}");
    let mut honest = agent!(PINNING);
    honest.ok(&format!("open x {descriptor}"));
    honest.ok("timeline x");
    // What the importer had is free again.
    drop(connections);
    eventually("files of counter pages", 1, || {
        let files = exporter.census().descriptors;
        files.iter().filter(|(kind, _)| kind.contains("device-ipc-words")).map(|(_, count)| count).sum()
    });
}

/// A grant that its bearer does not use counts for the importer that has asked for it, also when its connection has ended.
#[test]
fn grants_of_one_importer_leave_grants_for_others() {
    const MOST: u64 = 1 << 16;
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let target = Forged::of(&descriptor);
    let grants = || {
        let connection = Connection::greeted(&target);
        connection.send(&open_request(&target, 1)).expect("it reads");
        let FromExporter::Opened(opened) = connection.receive_message() else { panic!("no lease") };
        let mut granted = 0;
        loop {
            // Few enough replies wait to be read.
            for request in 0..256 {
                let grant = ToExporter::Grant { request, lease: opened.lease, limit_ms: 3_600_000 };
                connection.send(&grant).expect("it reads");
            }
            let mut refused = None;
            for _ in 0..256 {
                match connection.receive_message() {
                    FromExporter::Granted { .. } => granted += 1,
                    FromExporter::Refused {
                        refusal: Refusal::Failed { kind: QUOTA_EXCEEDED, detail },
                        ..
                    } => refused = Some(detail),
                    other => panic!("{other:?}"),
                }
            }
            if let Some(detail) = refused {
                return (granted, detail);
            }
        }
    };
    let (granted, detail) = grants();
    assert_eq!(granted, MOST, "{detail}");
    assert!(detail.contains(&format!("{MOST} unused grants of at most {MOST}")), "{detail}");
    assert_eq!(grants().0, 0, "a further connection of the process");
    let mut honest = agent!(PINNING);
    honest.ok(&format!("open y {descriptor}"));
    honest.ok("grant-of y 600000");
    exporter.ok("grant x 600000");
}

/// A keeper closes its channels at once; what keeps them is the memory that the peer has not opened.
#[test]
fn channels_of_one_process_leave_descriptors_for_others() {
    for keeps in [true, false] {
        let mut listener = agent!(PINNING);
        listener.share("x 4096");
        let name = format!("shares{}", listener.id());
        listener.ok(&format!("listen {name}"));
        listener.ok(&format!("limit-descriptors {FILES}"));
        let mut greedy = agent!(PINNING);
        let most = FILES / 8 / 4;
        for index in 0..most {
            listener.send(&format!("accept {name} c{index} 20000"));
            greedy.ok(&format!("connect {name} c{index} 20000"));
            assert!(matches!(listener.receive(), Answer::Done(_)));
            if !keeps {
                listener.ok(&format!("send c{index} 5 20000 of=x"));
                listener.ok(&format!("drop-channel c{index}"));
            }
        }
        // The listener refuses the process, and goes on to accept others.
        listener.send(&format!("accept {name} honest 20000"));
        let text = greedy.fails(&format!("connect {name} more 20000"), "QuotaExceeded");
        assert!(text.contains("no further channel"), "{text}");
        let mut honest = agent!(PINNING);
        honest.ok(&format!("connect {name} c 20000"));
        assert!(matches!(listener.receive(), Answer::Done(_)));
        listener.ok("send honest 5 20000 of=x");
        assert_eq!(honest.ok("receive c m 20000"), "5 1");
        // The channels of a process end with it.
        drop(greedy);
        if !keeps {
            eventually("holders", 1, || listener.holders("x"));
        }
    }
}

/// The leases of a closed connection end in slices; all of them end, and their importer's share is free again.
#[test]
fn many_leases_of_a_closed_connection_end() {
    let mut scene = super::Scene::new(PINNING);
    let connection = scene.greeted();
    for round in 0..20 {
        for request in 0..256 {
            connection.send(&open_request(&scene.forged, round * 256 + request)).expect("it reads");
        }
        for _ in 0..256 {
            assert!(matches!(connection.receive_message(), FromExporter::Opened(_)));
        }
    }
    drop(connection);
    scene.is_unharmed();
}
