//! Clients that guess, lie, send what is no message, or make a noise: refused or cut off, while honest peers are served;
//! and afterwards the exporter has what it had before.

mod conditions;
mod floods;
mod load;
mod shares;
mod strangers;

use std::time::{Duration, Instant};

use device_ipc_broker_tests::{
    Census, Child, Connection, DESCRIPTORS, Forged, FromExporter, Open, PINNING, Received, Refusal,
    ToExporter, advance_until, agent, eventually, no_more_than, open_request, settle, within,
};
use device_ipc_core::Descriptor;

/// The time after which a silent connection is closed (docs/spec/protocol.md).
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// The most that an honest open may take beside whatever is going on: less than [`HELLO_DEADLINE`].
const HONEST: Duration = Duration::from_secs(4);

/// An exporter with one export that is held by an honest importer, and what it had then.
struct Scene {
    machine: &'static str,
    exporter: Child,
    honest: Child,
    descriptor: Descriptor,
    forged: Forged,
    before: Census,
}

impl Scene {
    fn new(machine: &'static str) -> Self {
        let mut exporter = agent!(machine);
        let mut honest = agent!(machine);
        // Starts what is started once.
        exporter.share("warm 4096");
        exporter.ok("close warm 10000");
        let descriptor = exporter.share("x 4096");
        honest.ok(&format!("open x {descriptor}"));
        honest.ok("touch x");
        settle([&mut exporter, &mut honest]);
        let before = exporter.census();
        Self { machine, forged: Forged::of(&descriptor), exporter, honest, descriptor, before }
    }

    fn greeted(&self) -> Connection {
        Connection::greeted(&self.forged)
    }

    /// Asserts that a new importer opens, uses and releases within the time limit.
    #[track_caller]
    fn serves_honest_peers(&mut self) {
        let mut newcomer = agent!(self.machine);
        within(HONEST, "an honest open", || {
            newcomer.ok(&format!("open y {}", self.descriptor));
        });
        self.honest.ok("touch x");
    }

    /// Asserts that the exporter works and has the resources that it had.
    #[track_caller]
    fn is_unharmed(&mut self) {
        self.serves_honest_peers();
        eventually("holders", 1, || self.exporter.holders("x"));
        no_more_than(&self.before, "the exporter", &mut self.exporter);
    }
}

#[test]
fn confirmation_is_sent_to_holders_only_until_the_drop() {
    let mut scene = Scene::new(PINNING);
    let connection = scene.greeted();
    let ask = |request, lease| {
        connection.send(&ToExporter::Confirm { request, lease }).expect("it reads");
        connection.receive_message()
    };
    let dropped = |request| FromExporter::Refused { request, refusal: Refusal::Dropped };
    // Leases of the honest importer, and of no process.
    for lease in 0..5 {
        assert_eq!(ask(lease + 1, lease), dropped(lease + 1));
    }
    connection.send(&open_request(&scene.forged, 10)).expect("it reads");
    let FromExporter::Opened(grant) = connection.receive_message() else { panic!("no lease") };
    assert_eq!(ask(11, grant.lease), FromExporter::Confirmed { request: 11 });
    drop(connection);
    scene.is_unharmed();
    let connection = scene.greeted();
    connection.send(&open_request(&scene.forged, 20)).expect("it reads");
    let FromExporter::Opened(grant) = connection.receive_message() else { panic!("no lease") };
    scene.exporter.ok("drop x");
    connection.send(&ToExporter::Confirm { request: 21, lease: grant.lease }).expect("it reads");
    let answers = [connection.receive_message(), connection.receive_message()];
    assert!(answers.contains(&FromExporter::Dropped { export: scene.forged.export() }), "{answers:?}");
    assert!(answers.contains(&dropped(21)), "{answers:?}");
}

#[test]
fn listing_matches_the_specification() {
    let mut scene = Scene::new(PINNING);
    for index in 0..40 {
        scene.exporter.share(&format!("y{index} 4096"));
    }
    let connection = scene.greeted();
    let (mut after, mut all, mut pages) = (0, Vec::new(), 0);
    loop {
        connection.send(&ToExporter::List { request: 5, after }).expect("it reads");
        let FromExporter::Listing { request: 5, exports, more } = connection.receive_message() else {
            panic!("no listing")
        };
        pages += 1;
        after = exports.last().expect("one at least").export;
        all.extend(exports);
        if !more {
            break;
        }
    }
    assert_eq!((pages, all.len()), (2, 41));
    let first = &all[0];
    assert_eq!((first.export, first.bytes, first.opened, first.held_by), (scene.forged.export(), 4096, 1, 1));
    assert_eq!((first.backend.as_str(), first.dropped), ("mock", false));
    assert_eq!((first.holders[0].0, first.holders[0].1.as_str()), (scene.honest.id(), "broker-agent"));
}

#[test]
fn wrong_token_is_refused_and_a_guesser_disconnected() {
    let mut scene = Scene::new(PINNING);
    let guess = scene.forged.clone().with_token([7; 16]);
    let text = agent!(PINNING).fails(&format!("open x {}", guess.finish()), "NotPermitted");
    assert!(text.contains("token") && !text.contains("0707"), "{text}");
    let connection = scene.greeted();
    let mut refused = 0;
    for request in 1..=100 {
        if connection.send(&open_request(&guess, request)).is_err() {
            break;
        }
        match connection.receive(HONEST) {
            Received::Packet(bytes, _) => {
                let expected = FromExporter::Refused { request, refusal: Refusal::WrongToken };
                assert_eq!(bytes, postcard::to_stdvec(&expected).expect("it encodes"));
                refused += 1;
            }
            Received::Closed => break,
            Received::Nothing => panic!("no answer"),
        }
    }
    assert!((1..100).contains(&refused), "cut off after {refused} guesses");
    scene.is_unharmed();
}

#[test]
fn token_of_a_closed_export_opens_nothing() {
    let mut scene = Scene::new(PINNING);
    let ended = scene.exporter.share("y 4096");
    scene.exporter.ok("close y 10000");
    agent!(PINNING).fails(&format!("open y {ended}"), "ExportDropped");
    // Neither does it open another export of the same process.
    let (own, other) = (Forged::of(&ended), scene.forged.clone());
    let connection = scene.greeted();
    connection.send(&ToExporter::Open(Open { token: own.token(), ..other.open(1) })).expect("it reads");
    let expected = FromExporter::Refused { request: 1, refusal: Refusal::WrongToken };
    assert_eq!(connection.receive_message(), expected);
    drop(connection);
    scene.is_unharmed();
}

#[test]
fn second_implementation_opens_and_returns_by_the_specification() {
    let mut scene = Scene::new(DESCRIPTORS);
    let connection = scene.greeted();
    connection.send(&open_request(&scene.forged, 17)).expect("it reads");
    let Received::Packet(bytes, descriptors) = connection.receive(HONEST) else { panic!("no lease") };
    let Ok((FromExporter::Opened(grant), [])) = postcard::take_from_bytes(&bytes) else {
        panic!("not as it is documented: {bytes:?}")
    };
    assert_eq!((grant.request, grant.handles.len(), grant.keep, grant.confirm), (17, 1, true, false));
    assert_eq!((grant.handles[0].size, usize::from(grant.handles[0].fds)), (4096, descriptors.len()));
    assert_eq!(descriptors.len(), 1);
    assert_eq!(scene.exporter.holders("x"), 2);
    connection.send(&ToExporter::release(grant.lease)).expect("it reads");
    eventually("holders", 1, || scene.exporter.holders("x"));
    drop(connection);
    scene.is_unharmed();
}

/// A request for the same export that claims a lease on its memory.
fn open_like(forged: &Forged, request: u64, like: u64) -> ToExporter {
    ToExporter::Open(Open { like: Some(like), ..forged.open(request) })
}

#[test]
fn handles_are_omitted_only_for_holders_that_received_them() {
    let mut scene = Scene::new(PINNING);
    let other = Forged::of(&scene.exporter.share("y 4096"));
    let [connection, stranger] = [scene.greeted(), scene.greeted()];
    let ask = |connection: &Connection, message: &ToExporter| {
        connection.send(message).expect("it reads");
        match connection.receive_message() {
            FromExporter::Opened(grant) => (grant.lease, grant.like, grant.handles.len()),
            answer => panic!("no grant: {answer:?}"),
        }
    };
    let (first, like, handles) = ask(&connection, &open_request(&scene.forged, 1));
    assert_eq!((like, handles), (false, 1));
    let (second, like, handles) = ask(&connection, &open_like(&scene.forged, 2, first));
    assert_eq!((like, handles), (true, 0), "it has them");
    let (third, like, handles) = ask(&connection, &open_like(&other, 3, first));
    assert_eq!((like, handles), (false, 1), "it holds other memory");
    let (_, like, handles) = ask(&stranger, &open_like(&scene.forged, 4, first));
    assert_eq!((like, handles), (false, 1), "another connection holds it");
    let (last, like, handles) = ask(&connection, &open_like(&scene.forged, 5, u64::MAX));
    assert_eq!((like, handles), (false, 1), "nobody holds it");
    let (own, like, handles) = ask(&connection, &open_like(&scene.forged, 10, last + 1));
    assert_eq!((own, like, handles), (last + 1, false, 1), "it is the very lease that begins");
    connection.send(&ToExporter::release(first)).expect("it reads");
    let (_, like, handles) = ask(&connection, &open_like(&scene.forged, 6, first));
    assert_eq!((like, handles), (false, 1), "it was given back");
    let (_, like, handles) = ask(&connection, &open_like(&scene.forged, 7, second));
    assert_eq!((like, handles), (true, 0), "the second lease goes on by itself");
    let guess = scene.forged.clone().with_token([7; 16]);
    connection.send(&open_like(&guess, 8, second)).expect("it reads");
    let refused = FromExporter::Refused { request: 8, refusal: Refusal::WrongToken };
    assert_eq!(connection.receive_message(), refused, "a lease is no token");
    scene.exporter.ok("drop y");
    assert_eq!(connection.receive_message(), FromExporter::Dropped { export: other.export() });
    connection.send(&open_like(&other, 9, third)).expect("it reads");
    let refused = FromExporter::Refused { request: 9, refusal: Refusal::Dropped };
    assert_eq!(connection.receive_message(), refused, "nor the right to open what was dropped");
    drop((connection, stranger));
    scene.is_unharmed();
}

#[test]
fn malformed_message_closes_the_connection() {
    let mut scene = Scene::new(PINNING);
    let open = postcard::to_stdvec(&open_request(&scene.forged, 1)).expect("it encodes");
    let long_list = [&[1, 1, 1][..], &[0; 16], &[1], &[0xff; 8], &[0x7f]].concat();
    let packets = [
        ("an unknown message", vec![11]),
        ("a very unknown message", vec![0xff; 64]),
        ("half a message", open[..open.len() / 2].to_vec()),
        ("a message but its last byte", open[..open.len() - 1].to_vec()),
        ("a message and a byte", [open.as_slice(), &[0]].concat()),
        ("two messages", [open.as_slice(), &open].concat()),
        ("a list that claims 2^63 bytes", long_list),
        ("nothing", Vec::new()),
        ("text", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("a name that is no text", vec![0, 1, 2, 0xc3, 0x28]),
        ("as much as a message may have", vec![2; 128 * 1024]),
        ("more than a message may have", vec![2; 128 * 1024 + 1]),
        (
            "hello again",
            postcard::to_stdvec(&ToExporter::Hello { protocol: 1, program: "raw".into() }).expect(""),
        ),
        ("a release of nobody's lease", postcard::to_stdvec(&ToExporter::release(1 << 60)).expect("")),
    ];
    for (what, packet) in &packets {
        let connection = scene.greeted();
        // It may be cut off while it is still sending.
        let _ = connection.send_bytes(packet, &[]);
        within(HONEST, what, || connection.is_closed_within(HONEST));
    }
    // Before hello too.
    for (_, packet) in packets.iter().filter(|(what, _)| *what != "hello again") {
        let connection = Connection::to(scene.forged.address()).expect("it listens");
        let _ = connection.send_bytes(packet, &[]);
        connection.is_closed_within(HONEST);
    }
    scene.is_unharmed();
}

#[test]
fn nothing_is_opened_before_hello() {
    let mut scene = Scene::new(PINNING);
    let connection = Connection::to(scene.forged.address()).expect("it listens");
    connection.send(&open_request(&scene.forged, 1)).expect("it reads");
    assert!(matches!(connection.receive(HONEST), Received::Closed));
    let connection = Connection::to(scene.forged.address()).expect("it listens");
    connection.send(&ToExporter::List { request: 1, after: 0 }).expect("it reads");
    assert!(matches!(connection.receive(HONEST), Received::Closed));
    scene.is_unharmed();
}

#[test]
fn other_protocol_version_is_answered_with_ours_and_closed() {
    let mut scene = Scene::new(PINNING);
    for protocol in [0, 2, u16::MAX] {
        let connection = Connection::to(scene.forged.address()).expect("it listens");
        connection.send(&ToExporter::Hello { protocol, program: "raw".into() }).expect("it reads");
        let expected = FromExporter::Hello { protocol: 1, exporter: scene.forged.exporter() };
        assert_eq!(connection.receive_message(), expected);
        connection.is_closed_within(HONEST);
    }
    scene.is_unharmed();
}

#[test]
fn silent_connection_is_closed_and_delays_no_other() {
    let mut scene = Scene::new(PINNING);
    scene.exporter.ok("advance 0");
    let since = Instant::now();
    let silent: Vec<_> =
        (0..5).map(|_| Connection::to(scene.forged.address()).expect("it listens")).collect();
    let greeted = scene.greeted();
    scene.serves_honest_peers();
    let before = since.elapsed();
    let took = before + advance_until(&mut scene.exporter, || silent.iter().all(Connection::is_closed));
    assert!(took >= HELLO_DEADLINE, "cut off after {took:?} already");
    assert!(!greeted.is_closed(), "who has said hello may be silent");
    drop(greeted);
    scene.is_unharmed();
}

#[test]
fn lease_of_another_process_cannot_be_returned() {
    let mut scene = Scene::new(PINNING);
    for lease in 0..5 {
        let connection = scene.greeted();
        connection.send(&ToExporter::release(lease)).expect("it reads");
        connection.is_closed_within(HONEST);
    }
    assert_eq!(scene.exporter.holders("x"), 1);
    scene.is_unharmed();
}
