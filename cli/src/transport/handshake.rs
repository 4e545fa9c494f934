//! The handshake by which two processes prove to each other over TCP that they know the same key, without sending it.
//!
//! ```text
//! client                                     server
//! "dipc-tcp" version nonce(32)           ->
//!                                        <-  "dipc-tcp" version nonce(32)
//! proof(32) of the client                ->
//!                                        <-  0 proof(32) of the server, or 1: refused
//! ```
//!
//! A proof is HMAC-SHA256 with the key over the label of the role, the version and both nonces. The label prevents the replay
//! of a proof in the other role, and the nonces prevent the replay of proofs from earlier connections; proofs are compared
//! in constant time. The client sends its proof first, so that a client without the key receives no material for an offline
//! attack. After the handshake each message is authenticated ([`super::authenticated`]).
//!
//! Integers are big-endian. The hello contains the version, and a server always answers a complete hello with its own, so
//! that each side can report a version mismatch.

use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use hmac::Mac;

use super::authenticated::{AuthenticatedConnection, Role};
use super::connection::Connection;
use super::key::Key;

/// Version of the protocol over TCP.
pub(crate) const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"dipc-tcp";
const HELLO_BYTES: usize = 8 + 2 + 32;
const CLIENT_PROOF: &[u8; 24] = b"device-ipc client proof ";
const SERVER_PROOF: &[u8; 24] = b"device-ipc server proof ";
const SESSION: &[u8; 24] = b"device-ipc session key  ";

const ACCEPTED: u8 = 0;
const REFUSED: u8 = 1;

type Nonce = [u8; 32];

/// The key and the nonces of one connection.
struct Session<'a> {
    key: &'a Key,
    client: Nonce,
    server: Nonce,
}

impl Session<'_> {
    fn mac(&self, label: &[u8; 24]) -> impl Mac {
        self.key.mac(&[label, &VERSION.to_be_bytes(), &self.client, &self.server])
    }

    fn proof(&self, label: &[u8; 24]) -> Vec<u8> {
        self.mac(label).finalize().into_bytes().to_vec()
    }

    /// Verifies a proof in constant time.
    fn is_proof(&self, label: &[u8; 24], proof: &[u8]) -> bool {
        self.mac(label).verify_slice(proof).is_ok()
    }

    fn authenticated(&self, connection: Connection, role: Role) -> AuthenticatedConnection {
        AuthenticatedConnection::new(connection, self.proof(SESSION), role)
    }
}

/// Runs the server side of the handshake.
pub(crate) fn accept(
    mut connection: Connection,
    key: &Key,
    deadline: Instant,
) -> Result<AuthenticatedConnection> {
    let at = Some(deadline);
    let theirs = read_hello(&mut connection, deadline).context("cannot receive the hello")?;
    let server = nonce()?;
    connection.write(&hello(&server), at).context("cannot send the hello")?;
    let client = check_hello(&theirs)?;
    let session = Session { key, client, server };
    let mut proof = [0; 32];
    connection.read(&mut proof, at).context("cannot receive the proof of the client")?;
    if !session.is_proof(CLIENT_PROOF, &proof) {
        let _ = connection.write(&[REFUSED], at);
        bail!("permission denied: the client does not know the key");
    }
    let mut answer = vec![ACCEPTED];
    answer.extend(session.proof(SERVER_PROOF));
    connection.write(&answer, at).context("cannot send the proof")?;
    Ok(session.authenticated(connection, Role::Server))
}

/// Runs the client side of the handshake.
pub(crate) fn connect(
    mut connection: Connection,
    key: &Key,
    deadline: Instant,
) -> Result<AuthenticatedConnection> {
    let at = Some(deadline);
    let client = nonce()?;
    connection.write(&hello(&client), at).context("cannot send the hello")?;
    let theirs = read_hello(&mut connection, deadline)
        .context("cannot receive the hello of 'device-ipc send --listen'")?;
    let session = Session { key, client, server: check_hello(&theirs)? };
    connection.write(&session.proof(CLIENT_PROOF), at).context("cannot send the proof")?;
    let mut verdict = [REFUSED];
    connection.read(&mut verdict, at).context("cannot receive the verdict of the server")?;
    if verdict != [ACCEPTED] {
        bail!(
            "permission denied: the server has a different key; use the same key on both sides (--key-file or {})",
            super::key::KEY_VARIABLE
        );
    }
    let mut proof = [0; 32];
    connection.read(&mut proof, at).context("cannot receive the proof of the server")?;
    if !session.is_proof(SERVER_PROOF, &proof) {
        bail!("permission denied: the server does not know the key, so no descriptor is accepted from it");
    }
    Ok(session.authenticated(connection, Role::Client))
}

fn nonce() -> Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| anyhow!("cannot generate random bytes: {error}"))?;
    Ok(nonce)
}

fn hello(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_be_bytes(), nonce].concat()
}

/// Reads a hello. The magic is checked first, because a peer of another protocol may never send a complete hello.
fn read_hello(connection: &mut Connection, deadline: Instant) -> Result<[u8; HELLO_BYTES]> {
    let mut hello = [0; HELLO_BYTES];
    let (magic, rest) = hello.split_at_mut(MAGIC.len());
    connection.read(magic, Some(deadline))?;
    if magic != MAGIC {
        bail!(
            "protocol violation: the peer speaks another protocol; its first bytes are '{}'",
            magic.escape_ascii()
        );
    }
    connection.read(rest, Some(deadline))?;
    Ok(hello)
}

/// Returns the nonce if the version matches.
fn check_hello(hello: &[u8; HELLO_BYTES]) -> Result<Nonce> {
    let (head, nonce) = hello.split_at(HELLO_BYTES - 32);
    let version = u16::from_be_bytes([head[8], head[9]]);
    if version != VERSION {
        bail!(
            "the peer uses version {version} of the protocol, but this program uses version {VERSION}; use the same release \
             of device-ipc on both sides"
        );
    }
    Ok(nonce.try_into().expect("32 bytes"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread::JoinHandle;
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    /// A server with this key, and a raw connection to it.
    fn server(key: &'static [u8]) -> (TcpStream, JoinHandle<Result<AuthenticatedConnection>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let served =
            std::thread::spawn(move || accept(Connection::new(far).unwrap(), &Key::new(key), soon()));
        (near, served)
    }

    fn error(outcome: Result<AuthenticatedConnection>) -> String {
        format!("{:#}", outcome.expect_err("the handshake fails"))
    }

    #[test]
    fn same_key_authenticates_both_sides() {
        let (near, served) = server(b"the same key");
        let mut client = connect(Connection::new(near).unwrap(), &Key::new(b"the same key"), soon()).unwrap();
        let mut server = served.join().unwrap().unwrap();
        client.send(b"hello", Some(soon())).unwrap();
        assert_eq!(server.receive(Some(soon())).unwrap(), b"hello");
        server.send(b"", Some(soon())).unwrap();
        assert_eq!(client.receive(Some(soon())).unwrap(), b"");
    }

    #[test]
    fn different_key_is_rejected_on_both_sides() {
        let (near, served) = server(b"one key");
        let client = error(connect(Connection::new(near).unwrap(), &Key::new(b"another key"), soon()));
        assert!(client.contains("the server has a different key"), "{client}");
        let server = error(served.join().unwrap());
        assert!(server.contains("does not know the key"), "{server}");
    }

    #[test]
    fn server_that_replays_the_client_proof_is_rejected() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut impostor = listener.accept().unwrap().0;
        let replay = std::thread::spawn(move || {
            let (mut hello, mut proof) = ([0; HELLO_BYTES], [0; 32]);
            impostor.read_exact(&mut hello).unwrap();
            impostor.write_all(&hello).unwrap();
            impostor.read_exact(&mut proof).unwrap();
            impostor.write_all(&[ACCEPTED]).unwrap();
            impostor.write_all(&proof).unwrap();
        });
        let text = error(connect(Connection::new(near).unwrap(), &Key::new(b"a key"), soon()));
        assert!(text.contains("the server does not know the key"), "{text}");
        replay.join().unwrap();
    }

    #[test]
    fn version_mismatch_is_reported_on_both_sides() {
        let (mut near, served) = server(b"a key");
        let mut hello = hello(&[7; 32]);
        hello[8..10].copy_from_slice(&9_u16.to_be_bytes());
        near.write_all(&hello).unwrap();
        let mut theirs = [0; HELLO_BYTES];
        near.read_exact(&mut theirs).unwrap();
        assert_eq!(check_hello(&theirs).unwrap().len(), 32);
        let server = error(served.join().unwrap());
        assert!(server.contains("version 9") && server.contains("version 1"), "{server}");
    }

    #[test]
    fn other_protocol_is_rejected_and_silence_times_out() {
        let (mut near, served) = server(b"a key");
        near.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(error(served.join().unwrap()).contains("its first bytes are 'GET / HT'"));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.write_all(b"dipc").unwrap();
        let far = Connection::new(listener.accept().unwrap().0).unwrap();
        let at_once = Instant::now() + Duration::from_millis(50);
        assert!(error(accept(far, &Key::new(b"a key"), at_once)).contains("in time"));
    }

    #[test]
    fn slow_peer_does_not_extend_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = Connection::new(listener.accept().unwrap().0).unwrap();
        let begun = Instant::now();
        let slow = std::thread::spawn(move || {
            // Until the peer closes the connection.
            while near.write_all(b"d").is_ok() && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let text = error(accept(far, &Key::new(b"a key"), begun + Duration::from_millis(500)));
        assert!(text.contains("in time"), "{text}");
        slow.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}
