//! Peers without the key, and attackers between two peers that have it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::{AuthenticatedConnection, Key, TcpError, accept, connect};

type Outcome = Result<AuthenticatedConnection, TcpError>;

const ID: u64 = 7;

/// Lengths of the parts of the handshake.
const HELLO: usize = 42;
const CLIENT_HELLO: usize = HELLO + 8;
const PROOF: usize = 32;

fn key() -> Key {
    Key::new(b"a key that nobody guesses").unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Returns the client's and the server's end of a connection.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let server = listener.accept().unwrap().0;
    server.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (client, server)
}

fn serve(stream: TcpStream, deadline: Instant) -> Outcome {
    accept(stream, |id| (id == ID).then(key), deadline)
}

/// Passes what `from` sends on to `to` until an end, and returns it. Bit 0 of the byte `flipped` is inverted.
fn relay(mut from: &TcpStream, mut to: &TcpStream, flipped: Option<usize>) -> Vec<u8> {
    let (mut passed, mut buffer) = (Vec::new(), [0; 256]);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let begun = passed.len();
        passed.extend_from_slice(&buffer[..read]);
        if let Some(byte) =
            flipped.and_then(|index| passed.get_mut(begun..)?.get_mut(index.checked_sub(begun)?))
        {
            *byte ^= 1;
        }
        if to.write_all(&passed[begun..]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Read);
    let _ = to.shutdown(Shutdown::Write);
    passed
}

/// A session, as an attacker between client and server records it.
struct Session {
    client: Outcome,
    server: Outcome,
    from_client: Vec<u8>,
    from_server: Vec<u8>,
}

/// Runs a handshake through an attacker that inverts a bit of the n-th byte of one direction.
fn session(flipped_of_client: Option<usize>, flipped_of_server: Option<usize>) -> Session {
    let ((client, near), (far, server)) = (pair(), pair());
    std::thread::scope(|scope| {
        let from_client = scope.spawn(|| relay(&near, &far, flipped_of_client));
        let from_server = scope.spawn(|| relay(&far, &near, flipped_of_server));
        let served = scope.spawn(|| serve(server, soon()));
        let mut client = connect(client, ID, &key(), soon());
        if let Ok(connection) = &mut client {
            connection.send(b"a message", Some(soon())).unwrap();
            // The relays end when they have seen the ends of both directions.
            connection.socket().shutdown(Shutdown::Write).unwrap();
        }
        let server = served.join().unwrap();
        if let Ok(connection) = &server {
            let _ = connection.socket().shutdown(Shutdown::Write);
        }
        let (from_client, from_server) = (from_client.join().unwrap(), from_server.join().unwrap());
        Session { client, server, from_client, from_server }
    })
}

/// The limit that `docs/spec/security.md` states: a proof names no address.
#[test]
fn forwarded_connection_reaches_any_listener_with_the_key() {
    let forwarded = session(None, None);
    forwarded.client.unwrap();
    assert_eq!(forwarded.server.unwrap().receive(Some(soon())).unwrap(), b"a message");
}

#[test]
fn recorded_client_is_refused_by_a_server() {
    let recorded = session(None, None);
    assert_eq!(recorded.server.unwrap().receive(Some(soon())).unwrap(), b"a message");
    let (mut attacker, server) = pair();
    attacker.write_all(&recorded.from_client).unwrap();
    let refused = serve(server, soon());
    assert!(matches!(refused, Err(TcpError::ClientWithoutKey)), "{refused:?}");
    // The attacker receives the hello and the refusal: no proof.
    let mut answer = [0; HELLO + 1];
    attacker.read_exact(&mut answer).unwrap();
    assert_eq!(answer[HELLO], 1);
    assert!(!matches!(attacker.read(&mut [0]), Ok(1..)), "nothing follows");
}

#[test]
fn recorded_server_is_refused_by_a_client() {
    let recorded = session(None, None);
    assert_eq!(recorded.from_server.len(), HELLO + 1 + PROOF);
    let (client, mut attacker) = pair();
    attacker.write_all(&recorded.from_server).unwrap();
    let refused = connect(client, ID, &key(), soon());
    assert!(matches!(refused, Err(TcpError::ServerWithoutKey)), "{refused:?}");
}

#[test]
fn recorded_messages_are_refused_in_another_session() {
    let recorded = session(None, None);
    let message = &recorded.from_client[CLIENT_HELLO + PROOF..];
    let (near, far) = pair();
    let served = std::thread::spawn(|| serve(far, soon()));
    let client = connect(near, ID, &key(), soon()).unwrap();
    // It is the first message in this direction, as it was then.
    client.socket().write_all(message).unwrap();
    let received = served.join().unwrap().unwrap().receive(Some(soon()));
    assert!(matches!(received, Err(TcpError::Modified)), "{received:?}");
}

#[test]
fn flipped_bit_of_the_handshake_never_authenticates_both_sides() {
    for byte in 0..CLIENT_HELLO + PROOF {
        let met = session(Some(byte), None);
        assert!(met.client.is_err() && met.server.is_err(), "byte {byte} of the client: {:?}", met.client);
    }
    for byte in 0..HELLO + 1 + PROOF {
        let met = session(None, Some(byte));
        assert!(met.client.is_err(), "byte {byte} of the server: {:?}", met.client);
        // The server's own proof comes last: before it, the server has refused the client's.
        assert_eq!(met.server.is_ok(), byte >= HELLO, "byte {byte} of the server: {:?}", met.server);
    }
}

#[test]
fn connection_that_ends_at_any_byte_is_an_error_at_once() {
    let recorded = session(None, None);
    for length in 0..CLIENT_HELLO + PROOF {
        let (mut attacker, server) = pair();
        attacker.write_all(&recorded.from_client[..length]).unwrap();
        attacker.shutdown(Shutdown::Write).unwrap();
        let ended = serve(server, soon());
        assert!(matches!(ended, Err(TcpError::Closed { .. })), "{length}: {ended:?}");
    }
    for length in 0..recorded.from_server.len() {
        let (client, mut attacker) = pair();
        attacker.write_all(&recorded.from_server[..length]).unwrap();
        attacker.shutdown(Shutdown::Write).unwrap();
        let ended = connect(client, ID, &key(), soon());
        assert!(matches!(ended, Err(TcpError::Closed { .. })), "{length}: {ended:?}");
    }
}

/// Bytes without a pattern.
fn garbage(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

#[test]
fn garbage_at_each_state_is_an_error() {
    let recorded = session(None, None);
    for (valid, expected) in [
        (&recorded.from_client[..0], "speaks another protocol"),
        (&recorded.from_client[..8], "uses version"),
        (&recorded.from_client[..10], "which this server does not have"),
        (&recorded.from_client[..CLIENT_HELLO], "the client does not know the key"),
    ] {
        let (mut attacker, server) = pair();
        attacker.write_all(&[valid, &garbage(4096)].concat()).unwrap();
        let error = serve(server, soon()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for (valid, expected) in [
        (&recorded.from_server[..0], "speaks another protocol"),
        (&recorded.from_server[..8], "uses version"),
        (&recorded.from_server[..10], "the server has a different key"),
        (&recorded.from_server[..HELLO], "the server has a different key"),
        (&recorded.from_server[..=HELLO], "the server does not know the key"),
    ] {
        let (client, mut attacker) = pair();
        attacker.write_all(&[valid, &garbage(4096)].concat()).unwrap();
        let error = connect(client, ID, &key(), soon()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // After the handshake: an excessive length, and a plausible one.
    for (begin, expected) in
        [(&garbage(4)[..], "announces a message"), (&[0, 0, 0, 9], "modified in transit")]
    {
        let (near, far) = pair();
        let served = std::thread::spawn(|| serve(far, soon()));
        let client = connect(near, ID, &key(), soon()).unwrap();
        client.socket().write_all(&[begin, &garbage(4096)].concat()).unwrap();
        let mut server = served.join().unwrap().unwrap();
        let error = server.receive(Some(soon())).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(matches!(server.receive(Some(soon())), Err(TcpError::Unusable { .. })));
    }
}

#[test]
fn half_open_connection_ends_at_the_deadline_in_each_state() {
    // The peer sends a part and is silent then, as after the loss of its host: its socket is never closed.
    let recorded = session(None, None);
    let shortly = || Instant::now() + Duration::from_millis(50);
    for length in [0, 8, HELLO, CLIENT_HELLO, CLIENT_HELLO + PROOF - 1] {
        let (mut attacker, server) = pair();
        attacker.write_all(&recorded.from_client[..length]).unwrap();
        let ended = serve(server, shortly());
        assert!(matches!(ended, Err(TcpError::TimedOut { .. })), "{length}: {ended:?}");
    }
    for length in [0, 8, HELLO, HELLO + 1, HELLO + PROOF] {
        let (client, mut attacker) = pair();
        attacker.write_all(&recorded.from_server[..length]).unwrap();
        let ended = connect(client, ID, &key(), shortly());
        assert!(matches!(ended, Err(TcpError::TimedOut { .. })), "{length}: {ended:?}");
    }
    let (near, far) = pair();
    let served = std::thread::spawn(|| serve(far, soon()));
    let mut client = connect(near, ID, &key(), soon()).unwrap();
    let mut server = served.join().unwrap().unwrap();
    let silent = server.receive(Some(shortly()));
    assert!(matches!(silent, Err(TcpError::TimedOut { .. })), "{silent:?}");
    client.send(b"late", Some(soon())).unwrap();
    assert_eq!(server.receive(Some(soon())).unwrap(), b"late");
}
