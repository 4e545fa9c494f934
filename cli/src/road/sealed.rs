//! Messages between two processes that have proved the key to each other.
//!
//! A message is its length (4 bytes, big-endian), its bytes, and HMAC-SHA256 over the direction, the message's number in
//! that direction and the bytes, with a key of this connection: nobody between the two can change, leave out, repeat or
//! add one unnoticed.

use anyhow::{Context, Result, bail};
use hmac::Mac;

use super::key::mac;
use super::wire::{Deadline, Wire};

/// The longest message in bytes. A descriptor has 64 KiB at most.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

/// Which side this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

impl Role {
    /// What tells the messages of one side from those of the other.
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
pub(crate) struct Sealed {
    wire: Wire,
    key: Vec<u8>,
    role: Role,
    sent: u64,
    received: u64,
}

impl std::fmt::Debug for Sealed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealed({:?})", self.role)
    }
}

impl Sealed {
    pub(super) fn new(wire: Wire, key: Vec<u8>, role: Role) -> Self {
        Self { wire, key, role, sent: 0, received: 0 }
    }

    fn mac(&self, from: Role, number: u64, bytes: &[u8]) -> impl Mac {
        mac(&self.key, &[from.label(), &number.to_be_bytes(), bytes])
    }

    pub(crate) fn send(&mut self, bytes: &[u8], deadline: Deadline) -> Result<()> {
        if bytes.len() > MAX_MESSAGE_BYTES {
            bail!("a message of {} bytes; at most {MAX_MESSAGE_BYTES} can be sent", bytes.len());
        }
        let mut message = (bytes.len() as u32).to_be_bytes().to_vec();
        message.extend_from_slice(bytes);
        message.extend_from_slice(&self.mac(self.role, self.sent, bytes).finalize().into_bytes());
        self.sent += 1;
        self.wire.write(&message, deadline).context("sending a message")
    }

    pub(crate) fn receive(&mut self, deadline: Deadline) -> Result<Vec<u8>> {
        let mut length = [0; 4];
        self.wire.read(&mut length, deadline).context("waiting for a message")?;
        let length = u32::from_be_bytes(length) as usize;
        if length > MAX_MESSAGE_BYTES {
            bail!("a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are taken");
        }
        let (mut bytes, mut code) = (vec![0; length], [0; 32]);
        self.wire.read(&mut bytes, deadline).context("reading a message")?;
        self.wire.read(&mut code, deadline).context("reading a message")?;
        if self.mac(self.role.other(), self.received, &bytes).verify_slice(&code).is_err() {
            bail!("a message was changed on its way");
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

    fn pair() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Wire::new(near).unwrap(), listener.accept().unwrap().0)
    }

    fn soon() -> Deadline {
        Some(Instant::now() + Duration::from_secs(10))
    }

    /// The bytes of messages that a server sends.
    fn sent(messages: &[&[u8]]) -> Vec<u8> {
        let (near, mut far) = pair();
        let mut server = Sealed::new(near, vec![1; 32], Role::Server);
        for message in messages {
            server.send(message, soon()).unwrap();
        }
        drop(server);
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn messages_arrive_in_their_order_and_none_twice() {
        let (near, mut far) = pair();
        let mut bytes = sent(&[b"one", b"two"]);
        bytes.extend_from_within(bytes.len() / 2..);
        far.write_all(&bytes).unwrap();
        let mut client = Sealed::new(near, vec![1; 32], Role::Client);
        assert_eq!(client.receive(soon()).unwrap(), b"one");
        assert_eq!(client.receive(soon()).unwrap(), b"two");
        assert!(client.receive(soon()).unwrap_err().to_string().contains("changed on its way"));
    }

    fn received(bytes: &[u8], role: Role) -> Result<Vec<u8>> {
        let (near, mut far) = pair();
        far.write_all(bytes).unwrap();
        drop(far);
        Sealed::new(near, vec![1; 32], role).receive(soon())
    }

    #[test]
    fn a_changed_bit_is_noticed_wherever_it_is() {
        let bytes = sent(&[b"words"]);
        assert_eq!(received(&bytes, Role::Client).unwrap(), b"words");
        for bit in 32..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(received(&changed, Role::Client).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_message_is_not_taken_out_of_its_order_nor_from_its_own_side() {
        let bytes = sent(&[b"one", b"two"]);
        let second = &bytes[bytes.len() / 2..];
        assert!(received(second, Role::Client).unwrap_err().to_string().contains("changed on its way"));
        assert!(received(&bytes, Role::Server).is_err());
    }

    #[test]
    fn nothing_is_allocated_for_a_length_that_is_too_large() {
        let error = received(&u32::MAX.to_be_bytes(), Role::Client).unwrap_err().to_string();
        assert!(error.contains("4294967295 bytes was announced"), "{error}");
    }
}
