//! Other users, and servers that are not the exporter or no honest one: nothing secret is said to them, nothing of theirs
//! is kept, and the error says what they are.

use std::os::fd::{AsFd, BorrowedFd};

use device_ipc_broker_tests::{
    Answer, Connection, DEADLINE, DESCRIPTORS, FakeServer, Forged, FromExporter, Handle, Identity,
    LeaseAhead, NOBODY, Open, Opened, PINNING, Received, Refusal, ToExporter, agent, eventually, is_root,
    no_more_than, settle,
};
use device_ipc_core::Descriptor;

#[test]
fn other_user_opens_only_with_consent_of_both_sides() {
    if !is_root() {
        return;
    }
    let nobody = format!("allow-uid={NOBODY}");
    let group = format!("allow-gid={NOBODY}");
    let cases = [
        // The setting of the exporter, the setting of the importer, and the result.
        ("", "", Some("is served by user 0")),
        (nobody.as_str(), "", Some("is served by user 0")),
        ("", "allow-uid=0", Some("does not allow user 65534")),
        ("allow-uid=65533", "allow-uid=0", Some("does not allow user 65534")),
        ("allow-gid=65533", "allow-uid=0", Some("does not allow user 65534")),
        (nobody.as_str(), "allow-uid=0", None),
        (group.as_str(), "allow-uid=0", None),
        (nobody.as_str(), "allow-gid=0", None),
    ];
    for (exporter_allows, importer_allows, refused) in cases {
        let case = format!("exporter {exporter_allows:?}, importer {importer_allows:?}");
        let mut exporter = agent!(DESCRIPTORS);
        exporter.ok(&format!("ipc {exporter_allows}"));
        let descriptor = exporter.share("x 4096");
        // Everything that the first importer causes once has been done.
        let mut first = agent!(DESCRIPTORS);
        first.ok(&format!("open x {descriptor}"));
        first.kill();
        settle([&mut exporter]);
        let before = exporter.census();
        let mut importer = agent!(DESCRIPTORS);
        importer.ok(&format!("become {NOBODY} {NOBODY}"));
        importer.ok(&format!("ipc {importer_allows}"));
        let open = format!("open x {descriptor}");
        match refused {
            Some(why) => {
                let text = importer.fails(&open, "NotPermitted");
                assert!(text.contains(why), "{case}: {text}");
                assert_eq!(exporter.holders("x"), 0, "{case}");
            }
            None => {
                importer.ok(&open);
                assert_eq!(importer.ok("touch x"), "1", "{case}");
                assert_eq!(exporter.holders("x"), 1, "{case}");
            }
        }
        importer.kill();
        no_more_than(&before, &case, &mut exporter);
    }
}

#[test]
fn listing_by_a_stranger_is_refused() {
    if !is_root() {
        return;
    }
    let mut exporter = agent!(PINNING);
    exporter.share("x 12288");
    let own = format!("{}:1:12288:0", exporter.id());
    assert!(agent!(PINNING).ok("list").contains(&own));
    let mut stranger = agent!(PINNING);
    stranger.ok(&format!("become {NOBODY} {NOBODY}"));
    assert!(!stranger.ok("list").contains(&own));
}

/// A descriptor whose socket another process serves, although its exporter lives.
fn misled(name: &str, descriptor: &Descriptor) -> (FakeServer, Forged) {
    let name = format!("posing-{}-{name}", std::process::id());
    (FakeServer::at(name.as_bytes()), Forged::of(descriptor).with_address(name.as_bytes()))
}

/// A descriptor of this process, as if it were an exporter, and the socket that it names.
pub(crate) fn posing(name: &str) -> (FakeServer, Forged) {
    let descriptor = agent!(PINNING).share("x 4096");
    let (server, forged) = misled(name, &descriptor);
    let own = Identity::of_this_process(forged.exporter());
    (server, forged.with_exporter(own))
}

/// Answers hello with this identity, and gives all that the importer ever sends.
fn listen_to(server: &FakeServer, exporter: Identity) -> Vec<Vec<u8>> {
    let connection = server.accept();
    let mut heard = Vec::new();
    loop {
        match connection.receive(DEADLINE) {
            Received::Packet(bytes, _) => heard.push(bytes),
            Received::Closed | Received::Nothing => return heard,
        }
        if heard.len() == 1 {
            // It may be gone already.
            let _ = connection.send(&FromExporter::Hello { protocol: 1, exporter });
        }
    }
}

fn shows(heard: &[Vec<u8>], token: [u8; 16]) -> bool {
    heard.iter().any(|packet| packet.windows(16).any(|window| window == token))
}

#[test]
fn token_is_not_sent_to_a_server_of_another_user() {
    if !is_root() {
        return;
    }
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let (server, forged) = misled("other-user", &descriptor);
    let mut importer = agent!(PINNING);
    importer.ok(&format!("become {NOBODY} {NOBODY}"));
    importer.send(&format!("open x {}", forged.finish()));
    // The server claims the exporter's identity.
    let heard = listen_to(&server, forged.exporter());
    assert_eq!(heard, Vec::<Vec<u8>>::new(), "not even hello is said to a stranger");
    importer.receive_failure("the open", "NotPermitted");
}

#[test]
fn honest_squatter_receives_no_token() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let (server, forged) = misled("squatter", &descriptor);
    let mut importer = agent!(PINNING);
    importer.send(&format!("open x {}", forged.finish()));
    let own = Identity { pid: std::process::id(), ..forged.exporter() };
    let heard = listen_to(&server, own);
    assert!(heard.len() <= 1, "hello and no more");
    assert!(!shows(&heard, forged.token()));
    importer.receive_failure("the open", "ExporterGone");
}

#[test]
fn lying_squatter_receives_no_token() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let (server, forged) = misled("liar", &descriptor);
    let mut importer = agent!(PINNING);
    importer.send(&format!("open x {}", forged.finish()));
    // The claimed identity is in every descriptor; the kernel knows the owner of the socket.
    let heard = listen_to(&server, forged.exporter());
    assert!(!shows(&heard, forged.token()), "the token was sent to another process than the exporter");
    importer.receive_failure("the open", "ExporterGone");
}

#[test]
fn process_at_a_dead_exporters_address_is_not_asked() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    exporter.kill();
    let forged = Forged::of(&descriptor);
    let server = FakeServer::at(forged.address());
    let mut importer = agent!(PINNING);
    importer.fails(&format!("open x {descriptor}"), "ExporterGone");
    assert!(!server.is_visited_by(importer.id()), "it is known to be dead without asking");
}

#[test]
fn silent_or_garbled_server_is_an_error_in_time() {
    let (server, forged) = posing("nonsense");
    let mut importer = agent!(PINNING);
    importer.ok("cache 0 0");
    let open = format!("open x {} timeout=1000", forged.finish());
    importer.fails("open x dipc.AAAA", "Descriptor");
    let before = importer.census();
    let hello = |protocol| {
        postcard::to_stdvec(&FromExporter::Hello { protocol, exporter: forged.exporter() })
            .expect("it encodes")
    };
    let cases: [(&str, Option<Vec<u8>>, &str); 6] = [
        ("silence", None, "Timeout"),
        ("garbage", Some(vec![0xff; 100]), "Protocol"),
        ("half a hello", Some(hello(1)[..20].to_vec()), "Protocol"),
        ("a hello and more", Some([hello(1), vec![0]].concat()), "Protocol"),
        ("a newer version", Some(hello(2)), "Protocol"),
        ("a message out of turn", Some(vec![3, 1]), "Protocol"),
    ];
    for (what, says, variant) in cases {
        importer.send(&open);
        let connection = server.accept();
        assert!(matches!(connection.receive(DEADLINE), Received::Packet(..)), "{what}: hello");
        if let Some(bytes) = says {
            connection.send_bytes(&bytes, &[]).expect("it reads");
        }
        importer.receive_failure(what, variant);
        eventually(what, true, || importer.census().all_descriptors() <= before.all_descriptors());
    }
}

#[test]
fn unsolicited_descriptors_of_a_server_are_closed() {
    let (server, forged) = posing("gifts");
    let mut importer = agent!(PINNING);
    importer.fails("open x dipc.AAAA", "Descriptor");
    let before = importer.census();
    importer.send(&format!("open x {}", forged.finish()));
    let connection = server.accept();
    assert!(matches!(connection.receive(DEADLINE), Received::Packet(..)));
    let gift = connection_fd();
    let gifts = [gift.as_fd(); 200];
    let hello = FromExporter::Hello { protocol: 1, exporter: forged.exporter() };
    connection.send_bytes(&postcard::to_stdvec(&hello).expect("it encodes"), &gifts).expect("it reads");
    // An answer to what was not asked, with more of them.
    let dropped = FromExporter::Dropped { export: 7 };
    let _ = connection.send_bytes(&postcard::to_stdvec(&dropped).expect("it encodes"), &gifts);
    drop(connection);
    assert!(matches!(importer.receive(), Answer::Failed(_)));
    eventually("gifts", before.of_kind("pipe"), || importer.census().of_kind("pipe"));
}

/// Answers one importer's hello, with these descriptors, and gives its connection and the number of its request.
#[track_caller]
fn asked(server: &FakeServer, forged: &Forged, page: &[BorrowedFd<'_>]) -> (Connection, u64) {
    let connection = server.accept();
    assert!(matches!(connection.receive(DEADLINE), Received::Packet(..)), "hello");
    let hello = FromExporter::Hello { protocol: 1, exporter: forged.exporter() };
    connection.send_bytes(&postcard::to_stdvec(&hello).expect("it encodes"), page).expect("it reads");
    let Received::Packet(bytes, _) = connection.receive(DEADLINE) else { panic!("it asks for nothing") };
    match postcard::from_bytes(&bytes) {
        Ok(ToExporter::Open(Open { request, export, token, .. })) => {
            assert_eq!((export, token), (forged.export(), forged.token()));
            (connection, request)
        }
        other => panic!("it says {other:?}"),
    }
}

#[test]
fn reply_unlike_its_descriptor_fails_and_returns_the_lease() {
    let (server, forged) = posing("grants");
    let open = format!("open x {}", forged.finish());
    let handle =
        Handle { allocation: 1, kind: 1, bytes: vec![7; 64], fds: 0, size: 4096, generation: Some(1) };
    let gift = connection_fd();
    let cases: [(&str, Vec<Handle>, usize, &str); 9] = [
        ("what was never opened", vec![], 0, "Protocol"),
        ("no handle", vec![], 0, "Protocol"),
        ("two handles", vec![handle.clone(), handle.clone()], 0, "Protocol"),
        ("a descriptor that it does not speak of", vec![handle.clone()], 1, "Protocol"),
        ("descriptors that do not come", vec![Handle { fds: 2, ..handle.clone() }], 1, "Io"),
        ("another size", vec![Handle { size: 8192, ..handle.clone() }], 0, "StaleGeneration"),
        ("another generation", vec![Handle { generation: Some(99), ..handle.clone() }], 0, "StaleGeneration"),
        ("a handle that is none", vec![handle.clone()], 0, "Vendor"),
        ("a kind that is none", vec![Handle { kind: 77, ..handle.clone() }], 0, "Unsupported"),
    ];
    for (what, handles, gifts, variant) in cases {
        let mut importer = agent!(PINNING);
        importer.fails("open x dipc.AAAA", "Descriptor");
        let pipes = importer.census().of_kind("pipe");
        importer.send(&open);
        let (connection, request) = asked(&server, &forged, &[]);
        // The exporter was not told of a lease with the same memory.
        let like = what == "what was never opened";
        let grant = Opened { like, slot: Some(u32::MAX), ..Opened::of(request, 4711, handles) };
        let grant = postcard::to_stdvec(&FromExporter::Opened(grant)).expect("it encodes");
        connection.send_bytes(&grant, &vec![gift.as_fd(); gifts]).expect("it reads");
        // The lease comes back, or the connection is ended and the lease with it; it may ask before whether we live.
        loop {
            match connection.receive(DEADLINE) {
                Received::Closed => break,
                Received::Nothing => panic!("{what}: the lease does not come back"),
                Received::Packet(bytes, _) => match postcard::from_bytes(&bytes) {
                    Ok(ToExporter::Release { lease: 4711, .. }) => break,
                    Ok(ToExporter::Confirm { request, lease: 4711 }) => {
                        connection.send(&FromExporter::Confirmed { request }).expect("it reads");
                    }
                    other => panic!("{what}: it says {other:?}"),
                },
            }
        }
        importer.receive_failure(what, variant);
        eventually(what, pipes, || importer.census().of_kind("pipe"));
        assert_eq!(importer.counter("mapped_bytes"), 0, "{what}");
    }
}

/// Returns this many leases ahead, numbered from 1000 on.
fn leases_ahead(count: u64) -> Vec<LeaseAhead> {
    let lease = |number| LeaseAhead {
        export: 100 + number,
        token: [7; 16],
        lease: 1000 + number,
        slot: number as u32,
        ready: None,
        handle: None,
    };
    (0..count).map(lease).collect()
}

#[test]
fn leases_ahead_of_a_failed_open_are_returned() {
    let (server, forged) = posing("ahead");
    let handle =
        Handle { allocation: 1, kind: 1, bytes: vec![7; 64], fds: 0, size: 4096, generation: Some(1) };
    for is_refused in [false, true] {
        let mut importer = agent!(PINNING);
        importer.send(&format!("open x {}", forged.finish()));
        let (connection, request) = asked(&server, &forged, &[]);
        let ahead = FromExporter::Ahead { request, leases: leases_ahead(2) };
        connection.send(&ahead).expect("it reads");
        let reply = match is_refused {
            true => FromExporter::Refused { request, refusal: Refusal::Dropped },
            false => FromExporter::Opened(Opened::of(request, 4711, vec![handle.clone()])),
        };
        connection.send(&reply).expect("it reads");
        let mut expected = if is_refused { vec![1000, 1001] } else { vec![1000, 1001, 4711] };
        while !expected.is_empty() {
            let Received::Packet(bytes, _) = connection.receive(DEADLINE) else {
                panic!("{expected:?} do not come back")
            };
            match postcard::from_bytes(&bytes) {
                Ok(ToExporter::Release { lease, .. }) => expected.retain(|one| *one != lease),
                Ok(ToExporter::Confirm { request, .. }) => {
                    connection.send(&FromExporter::Confirmed { request }).expect("it reads");
                }
                other => panic!("it says {other:?}"),
            }
        }
        importer.receive_failure("the open", if is_refused { "ExportDropped" } else { "Vendor" });
        assert_eq!(importer.counter("imports_idle"), 0);
    }
}

/// Handles of this kind are addresses, for another copy of the library in the exporter's own process.
#[test]
fn address_from_another_process_is_not_used() {
    let (server, forged) = posing("address");
    let mut importer = agent!(PINNING);
    importer.send(&format!("open x {}", forged.finish()));
    let (connection, request) = asked(&server, &forged, &[]);
    let bytes = 0x1000_u64.to_le_bytes().to_vec();
    let address = Handle { allocation: 1, kind: u16::MAX, bytes, fds: 0, size: 4096, generation: Some(1) };
    let opened = Opened::of(request, 4711, vec![address]);
    connection.send(&FromExporter::Opened(opened)).expect("it reads");
    let text = importer.receive_failure("the open", "Protocol");
    assert!(text.contains("an address"), "{text}");
    assert_eq!(importer.counter("imports_idle"), 0);
}

#[test]
fn exporter_that_sends_too_many_leases_ahead_is_disconnected() {
    let (server, forged) = posing("many-ahead");
    let mut importer = agent!(PINNING);
    importer.send(&format!("open x {}", forged.finish()));
    let (connection, request) = asked(&server, &forged, &[]);
    connection.send(&FromExporter::Ahead { request, leases: leases_ahead(129) }).expect("it reads");
    importer.receive_failure("the open", "Protocol");
    connection.is_closed_within(DEADLINE);
    // One that nobody has asked for.
    importer.send(&format!("open x {}", forged.finish()));
    let (connection, request) = asked(&server, &forged, &[]);
    let stray = FromExporter::Ahead { request: request + 1, leases: leases_ahead(1) };
    connection.send(&stray).expect("it reads");
    importer.receive_failure("the open", "Protocol");
    connection.is_closed_within(DEADLINE);
}

#[test]
fn exporter_that_answers_another_request_is_disconnected() {
    let (server, forged) = posing("answers");
    let mut importer = agent!(PINNING);
    importer.send(&format!("open x {}", forged.finish()));
    let (connection, request) = asked(&server, &forged, &[]);
    let refused = FromExporter::Refused { request: request + 1, refusal: Refusal::Dropped };
    connection.send(&refused).expect("it reads");
    importer.receive_failure("the open", "Protocol");
    connection.is_closed_within(DEADLINE);
    // A confirmation is no grant.
    importer.send(&format!("open x {}", forged.finish()));
    let (connection, request) = asked(&server, &forged, &[]);
    connection.send(&FromExporter::Confirmed { request }).expect("it reads");
    importer.receive_failure("the open", "Protocol");
    connection.is_closed_within(DEADLINE);
}

#[test]
fn counter_page_truncated_while_read_harms_no_reader() {
    let (server, forged) = posing("page");
    let page =
        rustix::fs::memfd_create("device-ipc-test-page", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
    rustix::fs::ftruncate(&page, 4096).expect("it grows");
    let mut importer = agent!(PINNING);
    importer.send(&format!("open x {}", forged.finish()));
    let (connection, request) = asked(&server, &forged, &[page.as_fd()]);
    rustix::fs::ftruncate(&page, 0).expect("it shrinks");
    connection.send(&FromExporter::Refused { request, refusal: Refusal::Dropped }).expect("it reads");
    importer.receive_failure("the open", "ExportDropped");
    // The connection is kept, and so would be what came with it.
    importer.send(&format!("open x {}", forged.finish()));
    let Received::Packet(bytes, _) = connection.receive(DEADLINE) else { panic!("it asks again") };
    let Ok(ToExporter::Open(Open { request, .. })) = postcard::from_bytes(&bytes) else {
        panic!("it says {bytes:?}")
    };
    connection.send(&FromExporter::Refused { request, refusal: Refusal::Dropped }).expect("it reads");
    importer.receive_failure("the open", "ExportDropped");
}

/// Something to send along.
fn connection_fd() -> std::io::PipeReader {
    std::io::pipe().expect("a pipe").0
}
