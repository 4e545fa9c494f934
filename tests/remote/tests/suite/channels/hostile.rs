//! Peers that do not know the key, or do not follow the protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use device_ipc_tcp::{AuthenticatedConnection, Key, accept, connect};

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// The id of the key of channels.
const KEY_ID: u64 = 1;

fn key() -> Key {
    Key::new(KEY.as_bytes()).unwrap()
}

fn listening() -> (Process, SocketAddr) {
    let mut near = process();
    let address = near.ask(&format!("listen {KEY}"));
    (near, address.parse().expect("an address"))
}

/// Checks that a process with the key is accepted.
fn check_accepts(near: &mut Process, address: SocketAddr) {
    let mut far = process();
    near.ask("begin accept 60000");
    let connected = far.ask(&format!("connect {address} {KEY} 20000"));
    assert!(connected.ends_with(" on 127.0.0.1"), "{connected}");
    assert!(near.ask("end").ends_with(" on 127.0.0.1"));
    assert_eq!(near.ask("send one 20000"), "sent");
    assert_eq!(far.ask("receive 20000"), "one");
}

/// Returns the greeting of a process that connects.
fn greeting() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut far = process();
    far.ask(&format!("begin connect {} {KEY} 20000", listener.local_addr().unwrap()));
    let stream = listener.accept().unwrap().0;
    let mut server = accept(stream, |id| (id == KEY_ID).then(key), Instant::now() + LONG).unwrap();
    server.receive(Some(Instant::now() + LONG)).unwrap()
}

/// Connects to a listener as a process with this greeting.
fn greeted(near: &mut Process, address: SocketAddr, greeting: &[u8]) -> (AuthenticatedConnection, String) {
    near.ask("begin accept 20000");
    let stream = TcpStream::connect(address).unwrap();
    let mut peer = connect(stream, KEY_ID, &key(), Instant::now() + LONG).unwrap();
    peer.send(greeting, Some(Instant::now() + LONG)).unwrap();
    (peer, near.ask("end"))
}

#[test]
fn wrong_key_is_refused_by_both_sides() {
    let (mut near, address) = listening();
    let mut far = process();
    let error = far.ask(&format!("connect {address} another-key-of-16-bytes 20000"));
    assert!(error.starts_with("NotPermitted") && error.contains("another key"), "{error}");
    // The key of another use.
    let stream = TcpStream::connect(address).unwrap();
    connect(stream, 0, &key(), Instant::now() + LONG).unwrap_err();
    // A listener that does not know the key.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    far.ask(&format!("begin connect {} {KEY} 20000", listener.local_addr().unwrap()));
    let stream = listener.accept().unwrap().0;
    accept(stream, |_| Some(Key::new(b"another key of 16 bytes").unwrap()), Instant::now() + LONG)
        .unwrap_err();
    let error = far.ask("end");
    assert!(error.starts_with("NotPermitted"), "{error}");
    let error = near.ask("accept 200");
    assert!(error.starts_with("Timeout"), "{error}");
    check_accepts(&mut near, address);
}

#[test]
fn garbage_and_silent_connections_keep_out_no_peer() {
    let (mut near, address) = listening();
    check_accepts(&mut near, address);
    near.ask("drop");
    let files = near.ask("files");
    let mut flood = Vec::new();
    for number in 0..300 {
        let mut stream = TcpStream::connect_timeout(&address, LONG).expect("the server makes room");
        if number % 2 == 0 {
            // The server may have closed it in favour of a newer connection.
            let _ = stream.write_all(&[number as u8 | 0x80; 64]);
        }
        flood.push(stream);
    }
    check_accepts(&mut near, address);
    near.ask("drop");
    drop(flood);
    eventually_files(&mut near, &files);
}

#[test]
fn greeting_that_is_none_fails_no_accept() {
    let (mut near, address) = listening();
    let mut other = greeting();
    other[8] += 1;
    let mut peers = [&b"no greeting"[..], &other].map(|greeting| {
        let stream = TcpStream::connect(address).unwrap();
        let mut peer = connect(stream, KEY_ID, &key(), Instant::now() + LONG).unwrap();
        peer.send(greeting, Some(Instant::now() + LONG)).unwrap();
        peer
    });
    check_accepts(&mut near, address);
    // The peer learns the version.
    let peer = &mut peers[1];
    let answer = peer.receive(Some(Instant::now() + LONG)).unwrap();
    assert!(answer.starts_with(b"dipcchan"));
}

/// Waits until the process closes the connection.
fn read_to_the_end(peer: &AuthenticatedConnection) {
    let mut socket = peer.socket().try_clone().unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    // An end or a reset, and not the timeout.
    if let Err(error) = socket.read_to_end(&mut Vec::new()) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
}

/// A channel message of one byte without exports.
const MESSAGE: &[u8] = &[1, 5, 0, 0, 0, 0, b'x'];

#[test]
fn message_that_violates_the_protocol_ends_the_channel() {
    let greeting = greeting();
    // Not a message; a state with an unknown direction; a header that is cut off; a counter that a stream should wait for.
    for violation in [&[9][..], &[2, 0, 0, 0, 4, 0], &[1, 1, 0], &[1, 5, 0, 1, 0, 0, b'x']] {
        let (mut near, address) = listening();
        let (mut peer, accepted) = greeted(&mut near, address, &greeting);
        assert!(accepted.ends_with(" on 127.0.0.1"), "{accepted}");
        peer.receive(Some(Instant::now() + LONG)).unwrap();
        peer.send(MESSAGE, Some(Instant::now() + LONG)).unwrap();
        assert_eq!(near.ask("receive 20000"), "x");
        peer.send(violation, Some(Instant::now() + LONG)).unwrap();
        let error = near.ask("receive 20000");
        assert!(error.starts_with("Protocol"), "{violation:?}: {error}");
        let error = near.ask("send x 20000");
        assert!(error.starts_with("Protocol"), "{violation:?}: {error}");
        read_to_the_end(&peer);
    }
}

#[test]
fn peer_that_sends_more_than_it_may_is_disconnected() {
    let greeting = greeting();
    // More messages than may be on the way; a message above the limit of 64 MiB, in parts.
    let part = [&[0, 0x80, 0x80, 0x40][..], &[7; 1 << 20]].concat();
    for (message, count) in [(MESSAGE.to_vec(), 65), (part, 65)] {
        let (mut near, address) = listening();
        let (mut peer, _) = greeted(&mut near, address, &greeting);
        for _ in 0..count {
            // The process may have closed the connection already.
            let _ = peer.send(&message, Some(Instant::now() + LONG));
        }
        read_to_the_end(&peer);
        let error = loop {
            let answer = near.ask("receive 20000");
            if answer != "x" {
                break answer;
            }
        };
        assert!(error.starts_with("Protocol"), "{error}");
    }
}

#[test]
fn client_that_proves_the_key_and_is_silent_is_not_accepted() {
    let (mut near, address) = listening();
    let stream = TcpStream::connect(address).unwrap();
    let mut silent = connect(stream, KEY_ID, &key(), Instant::now() + LONG).unwrap();
    let begun = Instant::now();
    // It is disconnected after 5 s.
    silent.receive(Some(Instant::now() + LONG)).unwrap_err();
    assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    check_accepts(&mut near, address);
}
