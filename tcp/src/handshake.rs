//! The handshake by which two processes prove to each other that they know the same key, without sending it.
//!
//! ```text
//! client                                     server
//! "dipc-tcp" version nonce(32) key id(8) ->
//!                                        <-  "dipc-tcp" version nonce(32)
//! proof(32) of the client                ->
//!                                        <-  0 proof(32) of the server, or 1: refused
//! ```
//!
//! A proof is HMAC-SHA256 with the key over the label of the role, the version, the key id and both nonces. The label prevents
//! the replay of a proof in the other role, and the nonces prevent the replay of proofs from earlier connections; proofs are
//! compared in constant time. The client sends its proof first, so that a client without the key receives no material for an
//! offline attack. The key of the session is a third HMAC over the same values, with its own label.
//!
//! A server that does not have the key id goes on with a random key, so that a client cannot find out which ids exist.
//!
//! Integers are big-endian. The part up to the nonce is equal in all versions, and a server always answers it with its own, so
//! that each side can report a version mismatch.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::authenticated::{AuthenticatedConnection, Role, Session};
use crate::error::TcpError;
use crate::key::{Key, random};
use crate::wire::{Deadline, read, write};

/// Version of the protocol.
pub const VERSION: u16 = 3;

const MAGIC: [u8; 8] = *b"dipc-tcp";
const HELLO_BYTES: usize = 8 + 2 + 32;
const CLIENT_PROOF: &[u8; 24] = b"device-ipc client proof ";
const SERVER_PROOF: &[u8; 24] = b"device-ipc server proof ";
const SESSION: &[u8; 24] = b"device-ipc session key  ";

const ACCEPTED: u8 = 0;
const REFUSED: u8 = 1;

const SET_UP: &str = "set up the connection";

type Nonce = [u8; 32];

/// The values that both sides of one connection know before they authenticate.
struct Proofs<'a> {
    key: &'a Key,
    key_id: u64,
    client: Nonce,
    server: Nonce,
}

impl Proofs<'_> {
    fn mac(&self, label: &[u8; 24]) -> Hmac<Sha256> {
        let (version, key_id) = (VERSION.to_be_bytes(), self.key_id.to_be_bytes());
        self.key.mac(&[label, &version, &key_id, &self.client, &self.server])
    }

    fn proof(&self, label: &[u8; 24]) -> Vec<u8> {
        self.mac(label).finalize().into_bytes().to_vec()
    }

    /// Verifies a proof in constant time.
    fn is_proof(&self, label: &[u8; 24], proof: &[u8]) -> bool {
        self.mac(label).verify_slice(proof).is_ok()
    }

    fn session(&self, role: Role) -> Session {
        Session::new(Key::derived(self.mac(SESSION).finalize().into_bytes().into()), role)
    }
}

/// Authenticates a client, as the server: the client has to know the key whose id it states, which `find_key` looks up.
///
/// The stream becomes a blocking one without Nagle's delay.
///
/// # Errors
///
/// [`TcpError::UnknownKey`] and [`TcpError::ClientWithoutKey`] for a client that is refused; the client cannot distinguish the
/// two. [`TcpError::TimedOut`] if the client has not completed the handshake by the deadline. The stream is dropped after
/// every error.
pub fn accept(
    stream: impl Into<Arc<TcpStream>>,
    find_key: impl FnOnce(u64) -> Option<Key>,
    deadline: Instant,
) -> Result<AuthenticatedConnection, TcpError> {
    let stream = stream.into();
    set_up(&stream)?;
    let session = serve(&stream, find_key, Some(deadline))?;
    Ok(AuthenticatedConnection::new(stream, session))
}

/// Authenticates the server, as the client: the server has to know the key, and finds it by this id.
///
/// The stream becomes a blocking one without Nagle's delay.
///
/// # Errors
///
/// [`TcpError::Refused`] if the server has a different key or none with this id, [`TcpError::ServerWithoutKey`] if it cannot
/// prove that it knows the key, and [`TcpError::TimedOut`] if it has not completed the handshake by the deadline. The
/// stream is dropped after every error.
pub fn connect(
    stream: impl Into<Arc<TcpStream>>,
    key_id: u64,
    key: &Key,
    deadline: Instant,
) -> Result<AuthenticatedConnection, TcpError> {
    let stream = stream.into();
    set_up(&stream)?;
    let session = request(&stream, key_id, key, Some(deadline))?;
    Ok(AuthenticatedConnection::new(stream, session))
}

/// Makes a stream block within deadlines, whatever mode it has inherited from the listener.
fn set_up(stream: &TcpStream) -> Result<(), TcpError> {
    let set_up = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
    set_up.map_err(|cause| TcpError::Io { step: SET_UP, cause })
}

/// Runs the server side of the handshake.
pub(crate) fn serve(
    stream: &TcpStream,
    find_key: impl FnOnce(u64) -> Option<Key>,
    at: Deadline,
) -> Result<Session, TcpError> {
    let theirs = read_hello(stream, at, "receive the hello")?;
    let server = random()?;
    write(stream, &hello(&server), at, "send the hello")?;
    let client = check_hello(&theirs)?;
    let mut key_id = [0; 8];
    read(stream, &mut key_id, at, "receive the hello")?;
    let key_id = u64::from_be_bytes(key_id);
    // Generated for every client, so that it takes an equal time for known and unknown ids.
    let unknown = Key::random()?;
    let found = find_key(key_id);
    let proofs = Proofs { key: found.as_ref().unwrap_or(&unknown), key_id, client, server };
    let mut proof = [0; 32];
    read(stream, &mut proof, at, "receive the proof of the client")?;
    if !proofs.is_proof(CLIENT_PROOF, &proof) {
        let _ = write(stream, &[REFUSED], at, "refuse the client");
        return Err(match found {
            Some(_) => TcpError::ClientWithoutKey,
            None => TcpError::UnknownKey { key_id },
        });
    }
    let mut answer = vec![ACCEPTED];
    answer.extend(proofs.proof(SERVER_PROOF));
    write(stream, &answer, at, "send the proof")?;
    Ok(proofs.session(Role::Server))
}

/// Runs the client side of the handshake.
pub(crate) fn request(stream: &TcpStream, key_id: u64, key: &Key, at: Deadline) -> Result<Session, TcpError> {
    let client = random()?;
    let mut ours = hello(&client);
    ours.extend(key_id.to_be_bytes());
    write(stream, &ours, at, "send the hello")?;
    let theirs = read_hello(stream, at, "receive the hello of the server")?;
    let proofs = Proofs { key, key_id, client, server: check_hello(&theirs)? };
    write(stream, &proofs.proof(CLIENT_PROOF), at, "send the proof")?;
    let mut verdict = [REFUSED];
    read(stream, &mut verdict, at, "receive the verdict of the server")?;
    if verdict != [ACCEPTED] {
        return Err(TcpError::Refused);
    }
    let mut proof = [0; 32];
    read(stream, &mut proof, at, "receive the proof of the server")?;
    if !proofs.is_proof(SERVER_PROOF, &proof) {
        return Err(TcpError::ServerWithoutKey);
    }
    Ok(proofs.session(Role::Client))
}

/// Returns the part of a hello that is equal in all versions.
fn hello(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_be_bytes(), nonce].concat()
}

/// Reads a hello. The magic is checked first, because a peer of another protocol may never send a complete hello.
fn read_hello(
    stream: &TcpStream,
    deadline: Deadline,
    step: &'static str,
) -> Result<[u8; HELLO_BYTES], TcpError> {
    let mut hello = [0; HELLO_BYTES];
    let (magic, rest) = hello.split_at_mut(MAGIC.len());
    read(stream, magic, deadline, step)?;
    if magic != MAGIC {
        return Err(TcpError::OtherProtocol { bytes: magic.try_into().expect("8 bytes") });
    }
    read(stream, rest, deadline, step)?;
    Ok(hello)
}

/// Returns the nonce if the version matches.
fn check_hello(hello: &[u8; HELLO_BYTES]) -> Result<Nonce, TcpError> {
    let (head, nonce) = hello.split_at(HELLO_BYTES - 32);
    let version = u16::from_be_bytes([head[8], head[9]]);
    if version != VERSION {
        return Err(TcpError::Version { version });
    }
    Ok(nonce.try_into().expect("32 bytes"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread::JoinHandle;
    use std::time::Duration;

    use super::*;

    /// The id of the key in these tests.
    const ID: u64 = 0x1122_3344_5566_7788;

    type Outcome = Result<AuthenticatedConnection, TcpError>;

    fn key(bytes: &[u8]) -> Key {
        Key::new(bytes).unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    /// A server with this key, and a raw connection to it.
    fn server(key: &'static [u8]) -> (TcpStream, JoinHandle<Outcome>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let served = std::thread::spawn(move || accept(far, |id| (id == ID).then(|| self::key(key)), soon()));
        (near, served)
    }

    fn error(outcome: Outcome) -> String {
        outcome.expect_err("the handshake fails").to_string()
    }

    #[test]
    fn same_key_authenticates_both_sides() {
        let (near, served) = server(b"the same key of the tests");
        let mut client = connect(near, ID, &key(b"the same key of the tests"), soon()).unwrap();
        let mut server = served.join().unwrap().unwrap();
        client.send(b"hello", Some(soon())).unwrap();
        assert_eq!(server.receive(Some(soon())).unwrap(), b"hello");
        server.send(b"", Some(soon())).unwrap();
        assert_eq!(client.receive(Some(soon())).unwrap(), b"");
    }

    #[test]
    fn different_key_is_rejected_on_both_sides() {
        let (near, served) = server(b"one key of the tests");
        let client = error(connect(near, ID, &key(b"another key of the tests"), soon()));
        assert!(client.contains("the server has a different key"), "{client}");
        let server = error(served.join().unwrap());
        assert!(server.contains("does not know the key"), "{server}");
    }

    #[test]
    fn unknown_key_id_looks_like_a_wrong_key_to_the_client() {
        let (near, served) = server(b"one key of the tests");
        let unknown = connect(near, ID + 1, &key(b"one key of the tests"), soon());
        assert!(matches!(unknown, Err(TcpError::Refused)), "{unknown:?}");
        let server = served.join().unwrap();
        assert!(matches!(server, Err(TcpError::UnknownKey { key_id }) if key_id == ID + 1), "{server:?}");
    }

    #[test]
    fn modified_key_id_is_rejected_even_with_the_same_key() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let served = std::thread::spawn(move || accept(far, |_| Some(key(b"a key of the tests")), soon()));
        let client = [7; 32];
        near.write_all(&[hello(&client), ID.to_be_bytes().to_vec()].concat()).unwrap();
        let mut theirs = [0; HELLO_BYTES];
        near.read_exact(&mut theirs).unwrap();
        let server = check_hello(&theirs).unwrap();
        // The proof of a client that has stated another id.
        let proofs = Proofs { key: &key(b"a key of the tests"), key_id: ID + 1, client, server };
        near.write_all(&proofs.proof(CLIENT_PROOF)).unwrap();
        let outcome = served.join().unwrap();
        assert!(matches!(outcome, Err(TcpError::ClientWithoutKey)), "{outcome:?}");
    }

    #[test]
    fn server_that_replays_the_client_proof_is_rejected() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut impostor = listener.accept().unwrap().0;
        let replay = std::thread::spawn(move || {
            let (mut hello, mut proof) = ([0; HELLO_BYTES + 8], [0; 32]);
            impostor.read_exact(&mut hello).unwrap();
            impostor.write_all(&hello[..HELLO_BYTES]).unwrap();
            impostor.read_exact(&mut proof).unwrap();
            impostor.write_all(&[ACCEPTED]).unwrap();
            impostor.write_all(&proof).unwrap();
        });
        let text = error(connect(near, ID, &key(b"a key of the tests"), soon()));
        assert!(text.contains("the server does not know the key"), "{text}");
        replay.join().unwrap();
    }

    #[test]
    fn client_that_presents_the_server_proof_is_rejected() {
        let (mut near, served) = server(b"a key of the tests");
        let client = [7; 32];
        near.write_all(&[hello(&client), ID.to_be_bytes().to_vec()].concat()).unwrap();
        let mut theirs = [0; HELLO_BYTES];
        near.read_exact(&mut theirs).unwrap();
        let server = check_hello(&theirs).unwrap();
        // The proof that the server itself would send on this connection.
        let proofs = Proofs { key: &key(b"a key of the tests"), key_id: ID, client, server };
        near.write_all(&proofs.proof(SERVER_PROOF)).unwrap();
        let outcome = served.join().unwrap();
        assert!(matches!(outcome, Err(TcpError::ClientWithoutKey)), "{outcome:?}");
    }

    #[test]
    fn version_mismatch_is_reported_on_both_sides() {
        let (mut near, served) = server(b"a key of the tests");
        let mut hello = hello(&[7; 32]);
        hello[8..10].copy_from_slice(&9_u16.to_be_bytes());
        near.write_all(&hello).unwrap();
        let mut theirs = [0; HELLO_BYTES];
        near.read_exact(&mut theirs).unwrap();
        assert_eq!(check_hello(&theirs).unwrap().len(), 32);
        let server = error(served.join().unwrap());
        assert!(server.contains("version 9") && server.contains("version 3"), "{server}");
    }

    #[test]
    fn other_protocol_is_rejected_and_silence_times_out() {
        let (mut near, served) = server(b"a key of the tests");
        near.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(error(served.join().unwrap()).contains("its first bytes are 'GET / HT'"));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.write_all(b"dipc").unwrap();
        let far = listener.accept().unwrap().0;
        let at_once = Instant::now() + Duration::from_millis(50);
        assert!(error(accept(far, |_| Some(key(b"a key of the tests")), at_once)).contains("in time"));
    }

    #[test]
    fn slow_peer_does_not_extend_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let begun = Instant::now();
        let slow = std::thread::spawn(move || {
            // Until the peer closes the connection.
            while near.write_all(b"d").is_ok() && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let text =
            error(accept(far, |_| Some(key(b"a key of the tests")), begun + Duration::from_millis(500)));
        assert!(text.contains("in time"), "{text}");
        slow.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}
