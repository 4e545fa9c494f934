//! TCP connections of device-ipc, for processes that have no Unix socket in common.
//!
//! On one host the kernel states the user of a peer. Between hosts no such statement exists, so both sides prove that they
//! know the same secret key ([`accept`], [`connect`]), and every message is authenticated afterwards
//! ([`AuthenticatedConnection`]). An attacker in between can read, delay and end a connection, but cannot modify, drop, repeat,
//! reorder or insert a message undetected. Messages are not encrypted.
//!
//! A server may have several keys. The client states the id of its key, a number without a secret, and the server looks the
//! key up.
//!
//! ```
//! use std::net::{TcpListener, TcpStream};
//! use std::time::{Duration, Instant};
//!
//! use device_ipc_tcp::{Key, accept, connect};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let key = Key::new(b"at least 16 random bytes")?;
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let address = listener.local_addr()?;
//! let deadline = Instant::now() + Duration::from_secs(10);
//!
//! let keys = [(7, key.clone())];
//! let server = std::thread::spawn(move || {
//!     let stream = listener.accept().expect("a client connects").0;
//!     let find = |id| keys.iter().find(|(known, _)| *known == id).map(|(_, key)| key.clone());
//!     let mut connection = accept(stream, find, deadline)?;
//!     let request = connection.receive(Some(deadline))?;
//!     connection.send(&request, Some(deadline))
//! });
//!
//! let mut connection = connect(TcpStream::connect(address)?, 7, &key, deadline)?;
//! connection.send(b"echo", Some(deadline))?;
//! assert_eq!(connection.receive(Some(deadline))?, b"echo");
//! server.join().expect("the server does not panic")?;
//! # Ok(())
//! # }
//! ```
//!
//! # Servers
//!
//! The crate starts no thread and has no event loop. A server bounds the number of connections that are in [`accept`], because
//! each of them may be silent until its deadline. It keeps a reference to each stream, an [`Arc`](std::sync::Arc), and shuts the
//! oldest one down ([`TcpStream::shutdown`]) to make room: the call that another thread has in progress then fails.
//!
//! [`TcpStream::shutdown`]: std::net::TcpStream::shutdown

mod authenticated;
mod error;
mod handshake;
#[cfg(test)]
mod hostile;
mod key;
mod wire;

pub use authenticated::{
    AuthenticatedConnection, AuthenticatedReceiver, AuthenticatedSender, MAX_MESSAGE_BYTES,
};
pub use error::TcpError;
pub use handshake::{VERSION, accept, connect};
pub use key::{Key, MIN_KEY_BYTES};
pub use wire::Deadline;
