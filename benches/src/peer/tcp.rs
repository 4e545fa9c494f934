//! Echoes over TCP: by a channel of another host, and by plain sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context, Result};
use device_ipc::{Channel, Ipc, Key, Message};

use super::channels::next;
use super::serve::in_background;
use crate::wait::TIMEOUT;

/// Maximum number of bytes of an answer.
pub(crate) const ANSWER_BYTES: usize = 64;

/// Returns the key of the channels of this program.
pub(crate) fn key() -> Key {
    Key::new(b"the key of a benchmark").expect("it is long enough")
}

/// Listens for a channel; a thread accepts it, and answers each message that begins with 1 with its first bytes.
pub(super) fn serve_channel(ipc: &Ipc) -> Result<String> {
    let listener = ipc.listen_tcp("127.0.0.1:0", &key()).start()?;
    let name = listener.address();
    in_background(move || echo(&listener.accept(TIMEOUT)?));
    Ok(name)
}

fn echo(channel: &Channel) -> Result<()> {
    while let Some(received) = next(channel)? {
        let bytes = received.bytes();
        if bytes.first() == Some(&1) {
            received.reply(Message::new().bytes(&bytes[..bytes.len().min(ANSWER_BYTES)]), TIMEOUT)?;
        }
    }
    Ok(())
}

/// As [`serve_channel`], by plain sockets: each message follows its length.
pub(super) fn serve_plain() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let name = listener.local_addr()?.to_string();
    in_background(move || {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        echo_plain(&stream)
    });
    Ok(name)
}

fn echo_plain(mut stream: &TcpStream) -> Result<()> {
    let mut message = Vec::new();
    let mut length = [0; 4];
    while stream.read_exact(&mut length).is_ok() {
        message.resize(u32::from_le_bytes(length) as usize, 0);
        stream.read_exact(&mut message).context("a message was truncated")?;
        if message.first() == Some(&1) {
            stream.write_all(&message[..message.len().min(ANSWER_BYTES)])?;
        }
    }
    Ok(())
}
