//! Authenticated messages between two processes that have completed the handshake.
//!
//! A message consists of its length (4 bytes, big-endian), its bytes, and HMAC-SHA256 with the session key over the
//! direction, the sequence number in that direction and the bytes. An attacker in between cannot modify, drop, repeat or
//! insert a message undetected.

use std::fmt;
use std::net::TcpStream;
use std::sync::Arc;

use hmac::Mac;

use crate::error::TcpError;
use crate::key::Key;
use crate::wire::{Deadline, read_some, write};

/// Maximum length of a message in bytes: 8 MiB.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// Length of the field that precedes a message.
const LENGTH_BYTES: usize = 4;

/// Length of the code that follows a message.
const CODE_BYTES: usize = 32;

/// The memory for a message grows by this number of bytes, so that an announced length alone allocates nothing.
const STEP_BYTES: usize = 64 << 10;

const SEND: &str = "send a message";
const RECEIVE: &str = "receive a message";

/// The side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
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

/// The messages of one connection.
pub(crate) struct Session {
    sending: Sending,
    receiving: Receiving,
}

/// The state of the direction in which this side sends.
struct Sending {
    key: Key,
    role: Role,
    sent: u64,
    /// Whether a send has failed, after which the peer may wait for the rest of a message.
    has_failed: bool,
}

/// The state of the direction in which this side receives.
struct Receiving {
    key: Key,
    /// The role of the peer.
    from: Role,
    received: u64,
    /// Maximum length of a message.
    limit: usize,
    /// The length of the next message, if it has arrived.
    length: Option<usize>,
    /// The part that has arrived of the length, or of the message and its code.
    partial: Vec<u8>,
    /// Whether a receive has failed for another reason than its deadline.
    has_failed: bool,
}

/// Returns the HMAC of a message, not finalized.
fn mac(key: &Key, from: Role, number: u64, bytes: &[u8]) -> impl Mac {
    key.mac(&[from.label(), &number.to_be_bytes(), bytes])
}

impl Session {
    pub(crate) fn new(key: Key, role: Role) -> Self {
        let sending = Sending { key: key.clone(), role, sent: 0, has_failed: false };
        let (from, length, partial) = (role.other(), None, Vec::new());
        let limit = MAX_MESSAGE_BYTES;
        let receiving = Receiving { key, from, received: 0, limit, length, partial, has_failed: false };
        Self { sending, receiving }
    }

    pub(crate) fn send(
        &mut self,
        stream: &TcpStream,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<(), TcpError> {
        self.sending.send(stream, bytes, deadline)
    }

    pub(crate) fn receive(&mut self, stream: &TcpStream, deadline: Deadline) -> Result<Vec<u8>, TcpError> {
        self.receiving.receive(stream, deadline)
    }
}

impl Sending {
    fn send(&mut self, stream: &TcpStream, bytes: &[u8], deadline: Deadline) -> Result<(), TcpError> {
        if self.has_failed {
            return Err(TcpError::Unusable { step: SEND });
        }
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(TcpError::TooLong { bytes: bytes.len() });
        }
        let mut message = Vec::with_capacity(LENGTH_BYTES + bytes.len() + CODE_BYTES);
        message.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
        message.extend_from_slice(bytes);
        message.extend_from_slice(&mac(&self.key, self.role, self.sent, bytes).finalize().into_bytes());
        self.sent += 1;
        let sent = write(stream, &message, deadline, SEND);
        self.has_failed = sent.is_err();
        sent
    }
}

impl Receiving {
    fn receive(&mut self, stream: &TcpStream, deadline: Deadline) -> Result<Vec<u8>, TcpError> {
        if self.has_failed {
            return Err(TcpError::Unusable { step: RECEIVE });
        }
        let received = self.continue_message(stream, deadline);
        self.has_failed = !matches!(received, Ok(_) | Err(TcpError::TimedOut { .. }));
        received
    }

    /// Receives the rest of the message of which a part has arrived.
    fn continue_message(&mut self, stream: &TcpStream, deadline: Deadline) -> Result<Vec<u8>, TcpError> {
        let length = match self.length {
            Some(length) => length,
            None => {
                self.fill(stream, LENGTH_BYTES, deadline)?;
                let length = self.partial[..].try_into().expect("4 bytes");
                let length = u32::from_be_bytes(length) as usize;
                if length > self.limit {
                    return Err(TcpError::ReceivedTooLong { bytes: length, limit: self.limit });
                }
                self.partial.clear();
                *self.length.insert(length)
            }
        };
        self.fill(stream, length + CODE_BYTES, deadline)?;
        self.length = None;
        let mut message = std::mem::take(&mut self.partial);
        let code = message.split_off(length);
        if mac(&self.key, self.from, self.received, &message).verify_slice(&code).is_err() {
            return Err(TcpError::Modified);
        }
        self.received += 1;
        Ok(message)
    }

    /// Reads until the partial message has this many bytes. Bytes that have arrived remain after an error.
    fn fill(&mut self, stream: &TcpStream, bytes: usize, deadline: Deadline) -> Result<(), TcpError> {
        while self.partial.len() < bytes {
            let begun = self.partial.len();
            self.partial.resize(bytes.min(begun + STEP_BYTES), 0);
            let read = read_some(stream, &mut self.partial[begun..], deadline, RECEIVE);
            self.partial.truncate(begun + *read.as_ref().unwrap_or(&0));
            read?;
        }
        Ok(())
    }
}

/// A connection whose two sides have proved to each other that they know the key, and whose messages are authenticated.
///
/// A drop closes the connection, unless another thread has a reference to its stream.
pub struct AuthenticatedConnection {
    stream: Arc<TcpStream>,
    session: Session,
}

impl fmt::Debug for AuthenticatedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuthenticatedConnection({:?})", self.session.sending.role)
    }
}

impl AuthenticatedConnection {
    pub(crate) fn new(stream: Arc<TcpStream>, session: Session) -> Self {
        Self { stream, session }
    }

    /// Sends a message of at most [`MAX_MESSAGE_BYTES`].
    ///
    /// # Errors
    ///
    /// [`TcpError::TooLong`]; [`TcpError::TimedOut`] if the peer has not taken the message by the deadline, and
    /// [`TcpError::Io`]. After any error but the first a part of the message may have been sent, so further sends return
    /// [`TcpError::Unusable`].
    pub fn send(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), TcpError> {
        self.session.send(&self.stream, bytes, deadline)
    }

    /// Receives the next message.
    ///
    /// No byte is lost at the deadline: a part of a message that has arrived is kept, and the next call continues with it. So
    /// a thread with other duties can call this method repeatedly with short deadlines. The method reads no byte beyond the
    /// message that it returns: the [`socket`](Self::socket) is readable if and only if a further byte has arrived.
    ///
    /// # Errors
    ///
    /// [`TcpError::TimedOut`] if no complete message has arrived by the deadline; [`TcpError::Closed`],
    /// [`TcpError::Io`], [`TcpError::Modified`] and [`TcpError::ReceivedTooLong`], after which further receives return
    /// [`TcpError::Unusable`].
    pub fn receive(&mut self, deadline: Deadline) -> Result<Vec<u8>, TcpError> {
        self.session.receive(&self.stream, deadline)
    }

    /// Limits the length of received messages, by default [`MAX_MESSAGE_BYTES`]: of a message of which a part has arrived, at most
    /// this number of bytes is kept.
    pub fn limit_received(&mut self, bytes: usize) {
        self.session.receiving.limit = bytes.min(MAX_MESSAGE_BYTES);
    }

    /// Returns the socket, for the address of the peer ([`TcpStream::peer_addr`]), to wait until it is readable
    /// ([`AsFd`](std::os::fd::AsFd)), and to shut the connection down by a second handle ([`TcpStream::try_clone`],
    /// [`TcpStream::shutdown`]): a send or receive that is in progress on another thread then fails.
    ///
    /// Reads and writes of the socket, and changes of its mode or timeouts, break the connection.
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Splits the connection into its two directions, which two threads can own. The connection is closed when both are
    /// dropped.
    pub fn split(self) -> (AuthenticatedSender, AuthenticatedReceiver) {
        let Session { sending, receiving } = self.session;
        let sender = AuthenticatedSender { stream: Arc::clone(&self.stream), sending };
        (sender, AuthenticatedReceiver { stream: self.stream, receiving })
    }
}

/// The sending direction of an [`AuthenticatedConnection`]; see [`AuthenticatedConnection::split`].
pub struct AuthenticatedSender {
    stream: Arc<TcpStream>,
    sending: Sending,
}

impl AuthenticatedSender {
    /// Sends a message, as [`AuthenticatedConnection::send`] does.
    ///
    /// # Errors
    ///
    /// As [`AuthenticatedConnection::send`].
    pub fn send(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), TcpError> {
        self.sending.send(&self.stream, bytes, deadline)
    }

    /// Returns the socket; see [`AuthenticatedConnection::socket`].
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }
}

impl fmt::Debug for AuthenticatedSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuthenticatedSender({:?})", self.sending.role)
    }
}

/// The receiving direction of an [`AuthenticatedConnection`]; see [`AuthenticatedConnection::split`].
pub struct AuthenticatedReceiver {
    stream: Arc<TcpStream>,
    receiving: Receiving,
}

impl AuthenticatedReceiver {
    /// Receives the next message, as [`AuthenticatedConnection::receive`] does.
    ///
    /// # Errors
    ///
    /// As [`AuthenticatedConnection::receive`].
    pub fn receive(&mut self, deadline: Deadline) -> Result<Vec<u8>, TcpError> {
        self.receiving.receive(&self.stream, deadline)
    }

    /// Returns the socket; see [`AuthenticatedConnection::socket`].
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }
}

impl fmt::Debug for AuthenticatedReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuthenticatedReceiver({:?})", self.receiving.from.other())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener};
    use std::time::{Duration, Instant};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn authenticated(stream: TcpStream, role: Role) -> AuthenticatedConnection {
        AuthenticatedConnection::new(stream.into(), Session::new(Key::from([1; 16]), role))
    }

    fn soon() -> Deadline {
        Some(Instant::now() + Duration::from_secs(10))
    }

    /// The bytes of messages that a server sends.
    fn sent(messages: &[&[u8]]) -> Vec<u8> {
        let (near, mut far) = pair();
        let mut server = authenticated(near, Role::Server);
        for message in messages {
            server.send(message, soon()).unwrap();
        }
        drop(server);
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).unwrap();
        bytes
    }

    /// The length alone decides: no byte of the message is awaited or kept.
    #[test]
    fn message_above_the_limit_of_the_receiver_is_refused() {
        let (near, mut far) = pair();
        let mut server = authenticated(near, Role::Server);
        server.limit_received(64 << 10);
        far.write_all(&((64 << 10) + 1_u32).to_be_bytes()).unwrap();
        let refused = server.receive(soon());
        assert!(
            matches!(refused, Err(TcpError::ReceivedTooLong { bytes: 65_537, limit: 65_536 })),
            "{refused:?}"
        );
    }

    #[test]
    fn repeated_message_is_rejected() {
        let (near, mut far) = pair();
        let mut bytes = sent(&[b"one", b"two"]);
        bytes.extend_from_within(bytes.len() / 2..);
        far.write_all(&bytes).unwrap();
        let mut client = authenticated(near, Role::Client);
        assert_eq!(client.receive(soon()).unwrap(), b"one");
        assert_eq!(client.receive(soon()).unwrap(), b"two");
        assert!(client.receive(soon()).unwrap_err().to_string().contains("modified in transit"));
    }

    fn received(bytes: &[u8], role: Role) -> Result<Vec<u8>, TcpError> {
        let (near, mut far) = pair();
        far.write_all(bytes).unwrap();
        drop(far);
        authenticated(near, role).receive(soon())
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

    #[test]
    fn partial_message_is_kept_at_the_deadline() {
        let (near, mut far) = pair();
        let bytes = sent(&[b"one", b"two"]);
        let mut client = authenticated(near, Role::Client);
        // Each byte arrives before a deadline that passes without a complete message.
        for (index, byte) in bytes.iter().enumerate() {
            far.write_all(&[*byte]).unwrap();
            let shortly = Some(Instant::now() + Duration::from_millis(5));
            let received = client.receive(shortly);
            match index + 1 {
                at if at == bytes.len() / 2 => assert_eq!(received.unwrap(), b"one"),
                at if at == bytes.len() => assert_eq!(received.unwrap(), b"two"),
                _ => assert!(matches!(received, Err(TcpError::TimedOut { .. })), "{received:?}"),
            }
        }
    }

    #[test]
    fn receive_reads_no_byte_of_the_next_message() {
        let (near, mut far) = pair();
        let bytes = sent(&[b"one", b"two"]);
        far.write_all(&bytes).unwrap();
        let mut client = authenticated(near, Role::Client);
        client.receive(soon()).unwrap();
        let mut rest = Vec::new();
        drop(far);
        client.socket().read_to_end(&mut rest).unwrap();
        assert_eq!(rest, bytes[bytes.len() / 2..]);
    }

    #[test]
    fn longest_message_arrives_and_a_longer_one_is_not_sent() {
        let (near, far) = pair();
        let long = vec![7; MAX_MESSAGE_BYTES];
        let (mut client, mut server) = (authenticated(near, Role::Client), authenticated(far, Role::Server));
        let too_long = client.send(&vec![7; MAX_MESSAGE_BYTES + 1], soon());
        assert!(matches!(too_long, Err(TcpError::TooLong { .. })), "{too_long:?}");
        std::thread::scope(|scope| {
            scope.spawn(|| client.send(&long, soon()).unwrap());
            assert!(server.receive(soon()).unwrap() == long);
        });
    }

    #[test]
    fn failed_send_ends_sends_and_a_failed_receive_receives() {
        let (near, far) = pair();
        let mut client = authenticated(near, Role::Client);
        // The peer takes nothing, so that the buffers of the system are full at some time.
        let shortly = || Some(Instant::now() + Duration::from_millis(50));
        let failed = loop {
            if let Err(error) = client.send(&vec![7; MAX_MESSAGE_BYTES], shortly()) {
                break error;
            }
        };
        assert!(matches!(failed, TcpError::TimedOut { .. }), "{failed}");
        assert!(matches!(client.send(b"one", soon()), Err(TcpError::Unusable { .. })));
        (&far).write_all(&sent(&[b"one"])).unwrap();
        assert_eq!(client.receive(soon()).unwrap(), b"one");
        drop(far);
        let closed = client.receive(soon()).unwrap_err();
        assert!(matches!(closed, TcpError::Closed { .. } | TcpError::Io { .. }), "{closed}");
        assert!(matches!(client.receive(soon()), Err(TcpError::Unusable { .. })));
    }

    #[test]
    fn split_connection_sends_while_it_receives() {
        let (near, far) = pair();
        let (mut sender, mut receiver) = authenticated(near, Role::Client).split();
        let (mut back, mut forth) = authenticated(far, Role::Server).split();
        std::thread::scope(|scope| {
            let received = scope.spawn(|| receiver.receive(soon()).unwrap());
            sender.send(b"one", soon()).unwrap();
            assert_eq!(forth.receive(soon()).unwrap(), b"one");
            back.send(b"two", soon()).unwrap();
            assert_eq!(received.join().unwrap(), b"two");
        });
        drop((sender, receiver));
        assert!(matches!(forth.receive(soon()), Err(TcpError::Closed { .. })));
    }

    #[test]
    fn shutdown_by_another_thread_ends_a_receive() {
        let (near, _far) = pair();
        let mut client = authenticated(near, Role::Client);
        let handle = client.socket().try_clone().unwrap();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| client.receive(soon()));
            handle.shutdown(Shutdown::Both).unwrap();
            let ended = receiving.join().unwrap();
            assert!(matches!(ended, Err(TcpError::Closed { .. })), "{ended:?}");
        });
    }
}
