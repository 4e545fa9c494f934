//! Authenticated messages between two processes that have completed the handshake.
//!
//! A message consists of its length (4 bytes, big-endian), its bytes, and HMAC-SHA256 with the session key over the
//! direction, the sequence number in that direction and the bytes. An attacker in between cannot modify, drop, repeat or
//! insert a message undetected.

use anyhow::{Context, Result, bail};
use hmac::Mac;

use super::connection::{Connection, Deadline};
use super::key::mac;

/// Maximum length of a message in bytes. A descriptor has at most 64 KiB.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

/// The side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

impl Role {
    /// Returns the label that separates the messages of one side from those of the other.
    const fn label(self) -> &'static [u8; 24] {
        match self {
            Self::Client => b"device-ipc from client  ",
            Self::Server => b"device-ipc from server  ",
        }
    }

    const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// A connection whose messages are authenticated.
pub(crate) struct AuthenticatedConnection {
    connection: Connection,
    key: Vec<u8>,
    role: Role,
    sent: u64,
    received: u64,
}

impl std::fmt::Debug for AuthenticatedConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AuthenticatedConnection({:?})", self.role)
    }
}

impl AuthenticatedConnection {
    pub(super) fn new(connection: Connection, key: Vec<u8>, role: Role) -> Self {
        Self { connection, key, role, sent: 0, received: 0 }
    }

    fn mac(&self, from: Role, number: u64, bytes: &[u8]) -> impl Mac {
        mac(&self.key, &[from.label(), &number.to_be_bytes(), bytes])
    }

    pub(crate) fn send(&mut self, bytes: &[u8], deadline: Deadline) -> Result<()> {
        if bytes.len() > MAX_MESSAGE_BYTES {
            bail!("cannot send a message of {} B: the maximum is {MAX_MESSAGE_BYTES} B", bytes.len());
        }
        let mut message = (bytes.len() as u32).to_be_bytes().to_vec();
        message.extend_from_slice(bytes);
        message.extend_from_slice(&self.mac(self.role, self.sent, bytes).finalize().into_bytes());
        self.sent += 1;
        self.connection.write(&message, deadline).context("cannot send a message")
    }

    pub(crate) fn receive(&mut self, deadline: Deadline) -> Result<Vec<u8>> {
        let mut length = [0; 4];
        self.connection.read(&mut length, deadline).context("cannot receive a message")?;
        let length = u32::from_be_bytes(length) as usize;
        if length > MAX_MESSAGE_BYTES {
            bail!(
                "protocol violation: the peer announces a message of {length} B, but the maximum is {MAX_MESSAGE_BYTES} B"
            );
        }
        let (mut bytes, mut code) = (vec![0; length], [0; 32]);
        self.connection.read(&mut bytes, deadline).context("cannot receive a message")?;
        self.connection.read(&mut code, deadline).context("cannot receive a message")?;
        if self.mac(self.role.other(), self.received, &bytes).verify_slice(&code).is_err() {
            bail!("protocol violation: a message was modified in transit");
        }
        self.received += 1;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Connection::new(near).unwrap(), listener.accept().unwrap().0)
    }

    fn soon() -> Deadline {
        Some(Instant::now() + Duration::from_secs(10))
    }

    /// The bytes of messages that a server sends.
    fn sent(messages: &[&[u8]]) -> Vec<u8> {
        let (near, mut far) = pair();
        let mut server = AuthenticatedConnection::new(near, vec![1; 32], Role::Server);
        for message in messages {
            server.send(message, soon()).unwrap();
        }
        drop(server);
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn repeated_message_is_rejected() {
        let (near, mut far) = pair();
        let mut bytes = sent(&[b"one", b"two"]);
        bytes.extend_from_within(bytes.len() / 2..);
        far.write_all(&bytes).unwrap();
        let mut client = AuthenticatedConnection::new(near, vec![1; 32], Role::Client);
        assert_eq!(client.receive(soon()).unwrap(), b"one");
        assert_eq!(client.receive(soon()).unwrap(), b"two");
        assert!(client.receive(soon()).unwrap_err().to_string().contains("modified in transit"));
    }

    fn received(bytes: &[u8], role: Role) -> Result<Vec<u8>> {
        let (near, mut far) = pair();
        far.write_all(bytes).unwrap();
        drop(far);
        AuthenticatedConnection::new(near, vec![1; 32], role).receive(soon())
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let bytes = sent(&[b"words"]);
        assert_eq!(received(&bytes, Role::Client).unwrap(), b"words");
        for bit in 32..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(received(&changed, Role::Client).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn reordered_or_reflected_message_is_rejected() {
        let bytes = sent(&[b"one", b"two"]);
        let second = &bytes[bytes.len() / 2..];
        assert!(received(second, Role::Client).unwrap_err().to_string().contains("modified in transit"));
        assert!(received(&bytes, Role::Server).is_err());
    }

    #[test]
    fn excessive_message_length_is_rejected() {
        let error = received(&u32::MAX.to_be_bytes(), Role::Client).unwrap_err().to_string();
        assert!(error.contains("a message of 4294967295 B"), "{error}");
    }
}
