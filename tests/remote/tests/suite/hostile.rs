//! Importers and exporters that do not follow the protocol.

#[path = "hostile/network.rs"]
mod network;
#[path = "hostile/reuse.rs"]
mod reuse;
#[path = "hostile/rings.rs"]
mod rings;

use std::io::{Read, Write};
use std::net::{SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use device_ipc_remote_tests::{contents, eventually, eventually_files, key_of, socket_engine, with_address};
use device_ipc_tcp::{AuthenticatedConnection, Key, TcpError, accept, connect};
use device_ipc_test_process::Process;

const LONG: Duration = Duration::from_secs(60);

/// The messages of `docs/spec/remote.md`, for the engine "sockets", with time limits of 60 s: a lease without a ping has to last as
/// long as a test takes to make hundreds of connections.
const OPEN: &[u8] = b"\x00\x07sockets\xe0\xd4\x03\xe0\xd4\x03HHHHHHHHHHHHHHHH\x07\x01x";
const PING: &[u8] = &[1];
const RELEASE: &[u8] = &[2];
const PONG: &[u8] = &[3];
const GRANTED: &[u8] = &[0, 1];

device_ipc_remote_tests::processes! {
    exporter: exporter, || socket_engine("sockets");
    importer: importer, || socket_engine("sockets");
}

fn process(role: &str) -> (Process, String) {
    let mut process = Process::of_test(&format!("{}::{role}", module_path!()), &[]);
    let loaded = process.ask("load ");
    (process, loaded)
}

/// Starts an exporter of 64 B.
fn exporter_of_one() -> (Process, SocketAddr, String) {
    let (mut exporter, loaded) = process("exporter");
    let address = loaded.strip_prefix("loaded at Some(").and_then(|rest| rest.strip_suffix(')'));
    let address = address.unwrap_or_else(|| panic!("{loaded}")).parse().expect("an address");
    let descriptor = exporter.ask("share x 64 1");
    (exporter, address, descriptor)
}

fn authenticated(address: SocketAddr, descriptor: &str) -> AuthenticatedConnection {
    let (export, token) = key_of(descriptor);
    let stream = TcpStream::connect(address).expect("it listens");
    connect(stream, export, &Key::new(&token).unwrap(), Instant::now() + LONG).expect("the key is right")
}

fn ask(connection: &mut AuthenticatedConnection, request: &[u8]) -> Result<Vec<u8>, TcpError> {
    let until = Some(Instant::now() + LONG);
    connection.send(request, until)?;
    connection.receive(until)
}

fn is_closed(error: &TcpError) -> bool {
    matches!(error, TcpError::Closed { .. } | TcpError::Io { .. })
}

/// Checks that an importer is served.
fn check_served(descriptor: &str) {
    let (mut importer, loaded) = process("importer");
    assert_eq!(loaded, "loaded");
    let begun = Instant::now();
    assert_eq!(importer.ask(&format!("open pulled 1 20000 {descriptor}")), "64 B right, copied");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    importer.finish();
}

#[test]
fn clients_without_the_key_are_refused_alike() {
    let (_exporter, address, descriptor) = exporter_of_one();
    let (export, token) = key_of(&descriptor);
    for (id, key) in [(export, [0; 16]), (export + 1, token), (u64::MAX, token)] {
        let stream = TcpStream::connect(address).unwrap();
        let refused = connect(stream, id, &Key::new(&key).unwrap(), Instant::now() + LONG);
        assert!(matches!(refused, Err(TcpError::Refused)), "{refused:?}");
    }
    check_served(&descriptor);
}

#[test]
fn server_without_the_key_is_refused() {
    // The importer connects to another exporter, whose export has the same number.
    let (_exporter, address, descriptor) = exporter_of_one();
    let (_other, other, _) = exporter_of_one();
    let (export, token) = key_of(&descriptor);
    let stream = TcpStream::connect(other).unwrap();
    let refused = connect(stream, export, &Key::new(&token).unwrap(), Instant::now() + LONG);
    assert!(matches!(refused, Err(TcpError::Refused)), "{refused:?}");
    assert_ne!(address, other);
}

#[test]
fn silent_connections_keep_out_no_importer() {
    /// The exporter closes a connection whose client is silent after this time: `docs/spec/remote.md`.
    const HANDSHAKE: Duration = Duration::from_secs(5);
    let (_exporter, address, descriptor) = exporter_of_one();
    let deadline = Instant::now() + LONG;
    loop {
        let (mut importer, loaded) = process("importer");
        assert_eq!(loaded, "loaded");
        let begun = Instant::now();
        // More than are served, and than the system's queue holds.
        let silent: Vec<_> = (0..300)
            .map(|_| TcpStream::connect_timeout(&address, LONG).expect("the server makes room"))
            .collect();
        assert_eq!(importer.ask(&format!("open pulled 1 20000 {descriptor}")), "64 B right, copied");
        let took = begun.elapsed();
        importer.finish();
        drop(silent);
        // Before any of them was closed for its silence. A busy machine may take longer.
        if took < HANDSHAKE {
            return;
        }
        assert!(Instant::now() < deadline, "{took:?}");
    }
}

#[test]
fn garbage_closes_the_connection() {
    let (mut exporter, address, descriptor) = exporter_of_one();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut rest = Vec::new();
    // An end or a reset, and not the timeout.
    if let Err(error) = stream.read_to_end(&mut rest) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    for message in [&b""[..], b"\xff", b"\x00\x07sockets", &[PING, b"\x00"].concat(), b"\x00\x01 "] {
        let mut connection = authenticated(address, &descriptor);
        let error = ask(&mut connection, message).unwrap_err();
        assert!(is_closed(&error), "{message:?}: {error}");
    }
    assert_eq!(exporter.ask("holders x"), "");
    check_served(&descriptor);
}

#[test]
fn message_that_violates_the_protocol_ends_the_lease() {
    let (mut exporter, address, descriptor) = exporter_of_one();
    for violation in [OPEN, b"\xff"] {
        let mut connection = authenticated(address, &descriptor);
        assert_eq!(ask(&mut connection, OPEN).unwrap(), GRANTED);
        let metadata = connection.receive(Some(Instant::now() + LONG)).unwrap();
        assert_eq!(metadata[..2], [1, 1], "the metadata of one region");
        assert_eq!(exporter.ask("holders x"), "7 x on 127.0.0.1");
        assert_eq!(ask(&mut connection, PING).unwrap(), PONG);
        let error = ask(&mut connection, violation).unwrap_err();
        assert!(is_closed(&error), "{error}");
        eventually(&mut exporter, "holders x", "");
    }
}

#[test]
fn connection_serves_several_leases_one_after_the_other() {
    let (mut exporter, address, descriptor) = exporter_of_one();
    let mut connection = authenticated(address, &descriptor);
    for _ in 0..3 {
        assert_eq!(ask(&mut connection, OPEN).unwrap(), GRANTED);
        connection.receive(Some(Instant::now() + LONG)).unwrap();
        connection.send(RELEASE, Some(Instant::now() + LONG)).unwrap();
        // The reply follows the release.
        assert_eq!(ask(&mut connection, PING).unwrap(), PONG);
        assert_eq!(exporter.ask("holders x"), "");
    }
    exporter.ask("drop x");
    let refused = ask(&mut connection, OPEN).unwrap();
    assert_eq!(refused, [2, 0], "the export has been dropped");
}

/// The error of an importer whose exporter knows the token, answers Open with these messages, and then is silent or closes the
/// connection.
fn error_after(replies: &[&[u8]], closes: bool) -> String {
    let (_exporter, _, descriptor) = exporter_of_one();
    let begun = impostor(&descriptor, OPEN[0], replies, closes);
    let error = open_at(&descriptor, begun.0);
    begun.1.join().unwrap();
    error
}

/// Starts an exporter that knows the token, answers the first request, of this kind, with these messages, and then is silent or
/// closes the connection.
fn impostor(descriptor: &str, kind: u8, replies: &[&[u8]], closes: bool) -> (SocketAddrV4, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("an IPv4 address") };
    let (_, token) = key_of(descriptor);
    let replies: Vec<_> = replies.iter().map(|reply| reply.to_vec()).collect();
    let exporter = std::thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        let mut connection =
            accept(stream, |_| Some(Key::new(&token).unwrap()), Instant::now() + LONG).unwrap();
        let until = Some(Instant::now() + LONG);
        let open = connection.receive(until).unwrap();
        assert_eq!((open[0], &open[1..9]), (kind, &OPEN[1..9]), "{open:?}");
        for reply in replies {
            // The importer may have closed the connection.
            let _ = connection.send(&reply, until);
        }
        while !closes && connection.receive(until).is_ok() {}
    });
    (address, exporter)
}

fn open_at(descriptor: &str, address: SocketAddrV4) -> String {
    let (mut importer, _) = process("importer");
    let error = importer.ask(&format!("open pulled 1 700 {}", with_address(descriptor, address)));
    assert!(error.contains(&format!(" at {address}: ")), "{error}");
    error
}

#[test]
fn exporter_that_violates_the_protocol_causes_an_error() {
    let many = [&[1, 2, 1][..], b"x", &[1], b"y"].concat();
    for replies in [
        &[&b""[..]][..],
        &[b"\xff"],
        &[PONG],
        &[&[0, 0]],
        &[GRANTED, PONG],
        &[GRANTED, &[1, 0]],
        &[&[2, 9]],
        // Not the engine's metadata.
        &[GRANTED, b"\x01\x01\x01x"],
    ] {
        let error = error_after(replies, false);
        assert!(error.starts_with("Protocol of InPull"), "{replies:?}: {error}");
    }
    let error = error_after(&[GRANTED, &many], false);
    assert!(error.starts_with("Protocol of InPull") && error.contains("more metadata"), "{error}");
    let error = error_after(&[&[0, 2]], false);
    assert!(error.starts_with("InvalidRegion of InPull") && error.contains("1 regions"), "{error}");
}

#[test]
fn exporter_that_refuses_states_its_reason() {
    let reason = |refusal: &[u8]| error_after(&[&[&[2][..], refusal].concat()], false);
    assert!(reason(&[0]).starts_with("ExportDropped of InPull"));
    let error = reason(b"\x01\x08mooncake");
    assert!(error.starts_with("Unsupported of InPull") && error.contains("\"mooncake\""), "{error}");
    assert!(reason(&[2]).starts_with("Timeout of InPull"));
    let error = reason(b"\x03\x05freed");
    assert!(error.starts_with("StaleGeneration of InPull") && error.contains("freed"), "{error}");
    for (kind, stated) in [(10, "OutOfMemory"), (11, "QuotaExceeded"), (0, "System"), (200, "System")] {
        let error = reason(&[&[4, kind], &b"\x03why"[..]].concat());
        assert!(
            error.starts_with(&format!("Refused {stated} of InPull")) && error.contains("why"),
            "{error}"
        );
    }
}

#[test]
fn exporter_that_is_silent_or_closes_the_connection_causes_an_error() {
    for replies in [&[][..], &[GRANTED]] {
        let error = error_after(replies, false);
        assert!(error.starts_with("Timeout of InPull") && error.contains("after 700 ms"), "{error}");
        let error = error_after(replies, true);
        assert!(error.starts_with("ExporterGone of InPull"), "{error}");
    }
}
