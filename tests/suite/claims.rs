//! Tables of claims of several processes.

use std::sync::Arc;
use std::time::Duration;

use super::roles::{argument, start};
use device_ipc::front_end::{ClaimTable, Claims};
use device_ipc::mock::MockBackend;
use device_ipc::{Channel, Error, Ipc, Listener, Message};
use device_ipc_test_process::{Process, serve};

const TIMEOUT: Duration = Duration::from_secs(30);

fn ipc() -> Ipc {
    Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a valid machine"))
}

fn listen(ipc: &Ipc, name: &str) -> (Listener, String) {
    let name = format!("claims-{}-{name}", std::process::id());
    let listener = ipc.listen(&name).start().expect("the name is new");
    assert_eq!(listener.name(), name);
    (listener, name)
}

fn connect(listener: &Listener, name: &str) -> (Channel, Process) {
    let peer = start(module_path!(), "importer", &[("NAME", name)]);
    (listener.accept(TIMEOUT).expect("the peer connects"), peer)
}

/// Not a test: an importer, which a test starts.
#[test]
#[ignore = "started by the tests"]
fn role() {
    let ipc = ipc();
    let channel = ipc.connect(&argument("NAME")).timeout(TIMEOUT).start().expect("the test listens");
    let (mut claims, mut mapping) = (None, None);
    let of = |claims: &Option<Claims>, ticket: &str| {
        let claims = claims.as_ref().expect("join comes first");
        claims.claim(ticket.parse().expect("a ticket"))
    };
    serve(|command, argument| match command {
        "join" => {
            let (importer, timeout) = argument.split_once(' ').expect("a number and a time");
            let timeout = Duration::from_millis(timeout.parse().expect("a number"));
            match Claims::receive(&channel, importer.parse().expect("a number"), timeout) {
                Ok(received) => {
                    claims = Some(received);
                    "joined".into()
                }
                Err(error) => format!("{error:?}"),
            }
        }
        "open" => {
            let opened = ipc.open(&argument.parse().expect("a descriptor")).at_home().expect("it is shared");
            let received = mapping.insert(opened).claims();
            received.map_or_else(
                |error| format!("{error:?}"),
                |received| {
                    claims = Some(received);
                    "joined".into()
                },
            )
        }
        "claim" => of(&claims, argument).to_string(),
        "release" => {
            claims.as_ref().expect("join comes first").release(argument.parse().expect("a ticket"));
            "released".into()
        }
        "receive" => match channel.receive(TIMEOUT) {
            Ok(received) => String::from_utf8_lossy(received.bytes()).into_owned(),
            Err(error) => format!("{error:?}"),
        },
        other => panic!("unknown command {other:?}"),
    });
}

#[test]
fn item_is_kept_until_each_importer_has_released_it_or_terminated() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "kept");
    let table = ClaimTable::new().expect("memory");
    let mut importers: Vec<_> = (0..3_u32)
        .map(|number| {
            let (channel, mut peer) = connect(&listener, &name);
            assert_eq!(table.admit(&channel).expect("there is room"), number);
            assert_eq!(peer.ask(&format!("join {number} 30000")), "joined");
            (channel, peer)
        })
        .collect();
    assert!(table.offer(7) && table.offer(8));
    for (_, peer) in &mut importers {
        assert_eq!(peer.ask("claim 7"), "true");
    }
    assert!(!table.take_back(7));
    assert_eq!(importers[0].1.ask("release 7"), "released");
    assert!(table.has_released() && table.released().is_empty());
    importers[1].1.kill();
    assert_eq!(table.dismiss(1), 1);
    assert!(table.released().is_empty(), "the last importer still claims it");
    assert_eq!(importers[2].1.ask("release 7"), "released");
    assert_eq!(table.released(), [7]);
    assert_eq!(importers[2].1.ask("claim 7"), "false");
    assert_eq!(importers[2].1.ask("claim 8"), "true");
    // The number of the dismissed importer is free again.
    let (channel, mut peer) = connect(&listener, &name);
    assert_eq!(table.admit(&channel).expect("there is room"), 1);
    assert_eq!(peer.ask("join 1 30000"), "joined");
    channel.send(Message::new().bytes(b"after"), TIMEOUT).expect("it is open");
    assert_eq!(peer.ask("receive"), "after");
    assert_eq!(peer.ask("claim 8"), "true");
}

#[test]
fn table_that_precedes_a_message_is_kept_for_the_importer() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "order");
    let table = ClaimTable::new().expect("memory");
    let (channel, mut peer) = connect(&listener, &name);
    let number = table.admit(&channel).expect("there is room");
    channel.send(Message::new().bytes(b"first"), TIMEOUT).expect("it is open");
    assert_eq!(peer.ask("receive"), "first");
    assert_eq!(peer.ask(&format!("join {number} 30000")), "joined");
    assert!(table.offer(1));
    assert_eq!(peer.ask("claim 1"), "true");
    // More files than a receiver keeps violate the protocol.
    for _ in 0..3 {
        table.admit(&channel).expect("there is room");
    }
    let error = peer.ask("receive");
    assert!(error.starts_with("Protocol") && error.contains("more than 2 files"), "{error}");
}

#[test]
fn table_that_does_not_arrive_is_an_error() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "missing");
    let (_silent, mut peer) = connect(&listener, &name);
    let error = peer.ask("join 0 20");
    assert!(error.starts_with("Timeout"), "{error}");
    let (channel, mut peer) = connect(&listener, &name);
    channel.send(Message::new(), TIMEOUT).expect("it is open");
    let error = peer.ask("join 0 30000");
    assert!(error.starts_with("Protocol") && error.contains("instead of a file"), "{error}");
    let (channel, mut peer) = connect(&listener, &name);
    peer.send("join 0 30000");
    drop(channel);
    let error = peer.receive();
    assert!(error.starts_with("ChannelClosed"), "{error}");
}

#[test]
fn table_has_a_limited_number_of_importers() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "limit");
    let table = ClaimTable::new().expect("memory");
    let (channel, _peer) = connect(&listener, &name);
    for number in 0..46 {
        assert_eq!(table.admit(&channel).expect("there is room"), number);
    }
    let refused = table.admit(&channel);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    table.dismiss(45);
    assert_eq!(table.admit(&channel).expect("there is room"), 45);
}

#[test]
fn claims_by_a_lease_end_with_the_connection() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "lease");
    let table = Arc::new(ClaimTable::new().expect("memory"));
    let share =
        || ipc.share(ipc.allocate(0, 4096).expect("memory")).claims(&table).start().expect("it is shared");
    let exports = [share(), share()];
    let mut peers: Vec<_> = (0..2).map(|_| connect(&listener, &name).1).collect();
    assert!(table.offer(7) && table.offer(8));
    for peer in &mut peers {
        // The number is that of the connection, whichever export it came with.
        for export in &exports {
            assert_eq!(peer.ask(&format!("open {}", export.descriptor())), "joined");
        }
        assert_eq!(peer.ask("claim 7"), "true");
    }
    assert_eq!(peers[1].ask("claim 8"), "true");
    assert!(table.is_claimed(7) && !table.take_back(7) && table.is_unused(7));
    assert_eq!(peers[0].ask("release 7"), "released");
    assert!(table.is_claimed(7) && !table.is_unused(7));
    peers[1].kill();
    drop(peers.remove(0));
    // Of the first export they keep an idle lease at most.
    let error = exports[1].wait_released(TIMEOUT);
    assert!(matches!(error, Err(Error::HolderDied { .. })), "{error:?}");
    exports[1].wait_released(TIMEOUT).expect("both have terminated");
    assert!(!table.is_claimed(7) && !table.is_claimed(8) && !table.is_crowded());
    assert!(table.take_back(7) && table.take_back(8));
}

#[test]
fn lease_brings_no_table_where_the_export_has_none() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "none");
    let export = ipc.share(ipc.allocate(0, 4096).expect("memory")).start().expect("it is shared");
    let (_channel, mut peer) = connect(&listener, &name);
    let error = peer.ask(&format!("open {}", export.descriptor()));
    assert!(error.starts_with("ExportDropped"), "{error}");
}

/// Its claims are not in the table, so the exporter looks at its leases.
#[test]
fn further_importer_with_a_lease_has_claims_that_the_table_does_not_show() {
    let ipc = ipc();
    let (listener, name) = listen(&ipc, "crowd");
    let table = Arc::new(ClaimTable::new().expect("memory"));
    let export =
        ipc.share(ipc.allocate(0, 4096).expect("memory")).claims(&table).start().expect("it is shared");
    let (channel, mut peer) = connect(&listener, &name);
    for number in 0..46 {
        assert_eq!(table.admit(&channel).expect("there is room"), number);
    }
    assert!(table.offer(7) && !table.is_crowded());
    assert_eq!(peer.ask(&format!("open {}", export.descriptor())), "joined");
    assert!(table.is_crowded());
    assert_eq!(peer.ask("claim 7"), "true");
    assert!(!table.is_claimed(7) && export.holders().iter().len() == 1);
    assert_eq!(peer.ask("claim 9"), "false");
}
