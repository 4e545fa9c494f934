//! Entry point of the fuzz target `tcp` in `fuzz/`: everything that a peer can send.
//!
//! Compiled with the feature `fuzzing`, which is not part of the public interface.

use std::io;

use crate::authenticated::{MAX_MESSAGE_BYTES, Role, Session};
use crate::error::TcpError;
use crate::handshake::{request, serve};
use crate::key::Key;
use crate::wire::{Deadline, Wire};

/// A named input from which the target starts.
pub type Seed = (&'static str, Vec<u8>);

/// A peer that has sent these bytes and takes everything.
struct Peer<'a> {
    sends: &'a [u8],
    takes: Vec<u8>,
}

impl Wire for Peer<'_> {
    fn read_some(&mut self, buffer: &mut [u8], _: Deadline) -> io::Result<usize> {
        // Pieces of different lengths, as they arrive from a network.
        let pieces = buffer.len().min(self.sends.len()).min(1 + self.sends.len() % 37);
        let (read, rest) = self.sends.split_at(pieces);
        buffer[..pieces].copy_from_slice(read);
        self.sends = rest;
        Ok(pieces)
    }

    fn write_some(&mut self, bytes: &[u8], _: Deadline) -> io::Result<usize> {
        self.takes.extend_from_slice(bytes);
        Ok(bytes.len())
    }
}

fn key() -> Key {
    Key::new(b"the key of the fuzz target").expect("it is long enough")
}

fn session(role: Role) -> Session {
    Session::new(key(), role)
}

fn peer(sends: &[u8]) -> Peer<'_> {
    Peer { sends, takes: Vec::new() }
}

/// Passes the bytes to a server in the handshake, to a client in the handshake, and as messages to an authenticated
/// connection, whose session key is fixed so that messages of the corpus are authentic.
///
/// # Panics
///
/// If a handshake accepts the bytes, whose proofs cannot cover the random nonce of this process, or if a message is accepted
/// that the peer has not sent.
pub fn tcp(bytes: &[u8]) {
    assert!(serve(&mut peer(bytes), |id| (id == 0).then(key), None).is_err(), "no proof covers the nonce");
    assert!(request(&mut peer(bytes), 0, &key(), None).is_err(), "no proof covers the nonce");
    let (mut client, mut server) = (session(Role::Client), session(Role::Server));
    let mut from = peer(bytes);
    let mut begun = bytes.len();
    while let Ok(message) = client.receive(&mut from, None) {
        assert!(message.len() <= MAX_MESSAGE_BYTES);
        // A server that sends these messages sends these bytes.
        let mut again = peer(&[]);
        server.send(&mut again, &message, None).expect("the peer takes everything");
        let at = bytes.len() - begun;
        assert_eq!(again.takes, &bytes[at..bytes.len() - from.sends.len()]);
        begun = from.sends.len();
    }
    assert!(matches!(client.receive(&mut from, None), Err(TcpError::Unusable { .. })));
}

/// Returns the inputs from which the target starts.
pub fn tcp_seeds() -> Vec<Seed> {
    let mut hello = peer(&[]);
    // The client sends its hello, then reads the end of the stream.
    let _ = request(&mut hello, 0, &key(), None);
    let proof = [&hello.takes[..], &[7; 32]].concat();
    let accepted = [&hello.takes[..42], &[0], &[7; 32]].concat();
    let mut messages = peer(&[]);
    let mut server = session(Role::Server);
    for message in [&b""[..], b"one", &[7; 200]] {
        server.send(&mut messages, message, None).expect("the peer takes everything");
    }
    vec![
        ("hello", hello.takes),
        ("proof", proof),
        ("accepted", accepted),
        ("messages", messages.takes),
        ("long", u32::MAX.to_be_bytes().to_vec()),
    ]
}
