//! Tables of claims of several processes.

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
    let mut claims = None;
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
