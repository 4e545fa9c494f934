//! How two processes prove to each other, over TCP, that they know the same key, without sending it.
//!
//! ```text
//! client                                     server
//! "dipc-tcp" version nonce(32)           ->
//!                                        <-  "dipc-tcp" version nonce(32)
//! proof(32) of the client                ->
//!                                        <-  0 proof(32) of the server, or 1: refused
//! ```
//!
//! A proof is HMAC-SHA256 with the key over the role's label, the version and both nonces. The label keeps one role's proof
//! from being played back as the other's, the nonces keep those of earlier connections from it; proofs are compared in
//! constant time. The client proves first: who connects to a server gets nothing that the key could be guessed from.
//! From there on each message carries a code of authenticity ([`super::sealed`]).
//!
//! Integers are big-endian. The version is told before anything else, and a server that has read a client's hello always
//! answers with its own: so each side can say which versions met.

use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use hmac::Mac;

use super::key::Key;
use super::sealed::{Role, Sealed};
use super::wire::Wire;

/// The version of what is said over TCP.
pub(crate) const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"dipc-tcp";
const HELLO_BYTES: usize = 8 + 2 + 32;
const CLIENT_PROOF: &[u8; 24] = b"device-ipc client proof ";
const SERVER_PROOF: &[u8; 24] = b"device-ipc server proof ";
const SESSION: &[u8; 24] = b"device-ipc session key  ";

const ACCEPTED: u8 = 0;
const REFUSED: u8 = 1;

type Nonce = [u8; 32];

/// The nonces of one connection.
struct Meeting<'a> {
    key: &'a Key,
    client: Nonce,
    server: Nonce,
}

impl Meeting<'_> {
    fn mac(&self, label: &[u8; 24]) -> impl Mac {
        self.key.mac(&[label, &VERSION.to_be_bytes(), &self.client, &self.server])
    }

    fn proof(&self, label: &[u8; 24]) -> Vec<u8> {
        self.mac(label).finalize().into_bytes().to_vec()
    }

    /// In constant time.
    fn is_proof(&self, label: &[u8; 24], proof: &[u8]) -> bool {
        self.mac(label).verify_slice(proof).is_ok()
    }

    fn sealed(&self, wire: Wire, role: Role) -> Sealed {
        Sealed::new(wire, self.proof(SESSION), role)
    }
}

/// The side that listens.
pub(crate) fn serve(mut wire: Wire, key: &Key, deadline: Instant) -> Result<Sealed> {
    let at = Some(deadline);
    let theirs = read_hello(&mut wire, deadline).context("no hello came")?;
    let server = nonce()?;
    wire.write(&hello(&server), at).context("answering its hello")?;
    let client = check_hello(&theirs)?;
    let meeting = Meeting { key, client, server };
    let mut proof = [0; 32];
    wire.read(&mut proof, at).context("its proof did not come")?;
    if !meeting.is_proof(CLIENT_PROOF, &proof) {
        let _ = wire.write(&[REFUSED], at);
        bail!("it does not know the key");
    }
    let mut answer = vec![ACCEPTED];
    answer.extend(meeting.proof(SERVER_PROOF));
    wire.write(&answer, at).context("answering its proof")?;
    Ok(meeting.sealed(wire, Role::Server))
}

/// The side that connects.
pub(crate) fn join(mut wire: Wire, key: &Key, deadline: Instant) -> Result<Sealed> {
    let at = Some(deadline);
    let client = nonce()?;
    wire.write(&hello(&client), at).context("greeting it")?;
    let theirs = read_hello(&mut wire, deadline)
        .context("it did not answer the greeting as 'device-ipc send --listen' does")?;
    let meeting = Meeting { key, client, server: check_hello(&theirs)? };
    wire.write(&meeting.proof(CLIENT_PROOF), at).context("sending the proof")?;
    let mut verdict = [REFUSED];
    wire.read(&mut verdict, at).context("it did not answer the proof")?;
    if verdict != [ACCEPTED] {
        bail!(
            "it refused: the key here is another one than there (--key-file, {})",
            super::key::KEY_VARIABLE
        );
    }
    let mut proof = [0; 32];
    wire.read(&mut proof, at).context("its own proof did not come")?;
    if !meeting.is_proof(SERVER_PROOF, &proof) {
        bail!("it does not know the key itself, so nothing was taken from it");
    }
    Ok(meeting.sealed(wire, Role::Client))
}

fn nonce() -> Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| anyhow!("reading random bytes: {error}"))?;
    Ok(nonce)
}

fn hello(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_be_bytes(), nonce].concat()
}

/// The magic is looked at as soon as it is there: who speaks something else may never send as much as a hello.
fn read_hello(wire: &mut Wire, deadline: Instant) -> Result<[u8; HELLO_BYTES]> {
    let mut hello = [0; HELLO_BYTES];
    let (magic, rest) = hello.split_at_mut(MAGIC.len());
    wire.read(magic, Some(deadline))?;
    if magic != MAGIC {
        bail!("it does not speak this protocol: it began with '{}'", magic.escape_ascii());
    }
    wire.read(rest, Some(deadline))?;
    Ok(hello)
}

/// The nonce, where the version is this one.
fn check_hello(hello: &[u8; HELLO_BYTES]) -> Result<Nonce> {
    let (head, nonce) = hello.split_at(HELLO_BYTES - 32);
    let version = u16::from_be_bytes([head[8], head[9]]);
    if version != VERSION {
        bail!(
            "it speaks version {version} of the protocol, and this program version {VERSION}; use the same release of \
             device-ipc on both sides"
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
    fn server(key: &'static [u8]) -> (TcpStream, JoinHandle<Result<Sealed>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let served = std::thread::spawn(move || serve(Wire::new(far).unwrap(), &Key::new(key), soon()));
        (near, served)
    }

    fn error(outcome: Result<Sealed>) -> String {
        format!("{:#}", outcome.expect_err("it is refused"))
    }

    #[test]
    fn both_sides_meet_with_one_key() {
        let (near, served) = server(b"the same key");
        let mut client = join(Wire::new(near).unwrap(), &Key::new(b"the same key"), soon()).unwrap();
        let mut server = served.join().unwrap().unwrap();
        client.send(b"hello", Some(soon())).unwrap();
        assert_eq!(server.receive(Some(soon())).unwrap(), b"hello");
        server.send(b"", Some(soon())).unwrap();
        assert_eq!(client.receive(Some(soon())).unwrap(), b"");
    }

    #[test]
    fn another_key_is_refused_on_both_sides() {
        let (near, served) = server(b"one key");
        let client = error(join(Wire::new(near).unwrap(), &Key::new(b"another key"), soon()));
        assert!(client.contains("it refused: the key here is another one"), "{client}");
        let server = error(served.join().unwrap());
        assert!(server.contains("does not know the key"), "{server}");
    }

    #[test]
    fn a_server_without_the_key_cannot_pass_for_one_by_playing_back_what_it_was_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut impostor = listener.accept().unwrap().0;
        let played = std::thread::spawn(move || {
            let (mut hello, mut proof) = ([0; HELLO_BYTES], [0; 32]);
            impostor.read_exact(&mut hello).unwrap();
            impostor.write_all(&hello).unwrap();
            impostor.read_exact(&mut proof).unwrap();
            impostor.write_all(&[ACCEPTED]).unwrap();
            impostor.write_all(&proof).unwrap();
        });
        let refused = error(join(Wire::new(near).unwrap(), &Key::new(b"a key"), soon()));
        assert!(refused.contains("does not know the key itself"), "{refused}");
        played.join().unwrap();
    }

    #[test]
    fn another_version_is_named_on_both_sides() {
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
    fn garbage_is_told_by_its_first_bytes_and_silence_by_the_clock() {
        let (mut near, served) = server(b"a key");
        near.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(error(served.join().unwrap()).contains("it began with 'GET / HT'"));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.write_all(b"dipc").unwrap();
        let far = Wire::new(listener.accept().unwrap().0).unwrap();
        let at_once = Instant::now() + Duration::from_millis(50);
        assert!(error(serve(far, &Key::new(b"a key"), at_once)).contains("in time"));
    }

    #[test]
    fn a_byte_now_and_then_gains_no_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = Wire::new(listener.accept().unwrap().0).unwrap();
        let begun = Instant::now();
        let slow = std::thread::spawn(move || {
            // Until the other side has closed.
            while near.write_all(b"d").is_ok() && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let refused = error(serve(far, &Key::new(b"a key"), begun + Duration::from_millis(500)));
        assert!(refused.contains("in time"), "{refused}");
        slow.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}
