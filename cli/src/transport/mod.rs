//! Transports of a descriptor between two terminals: a file, text, or TCP with a shared key.
//!
//! A descriptor contains a secret, the token of the export. Over TCP, sender and receiver prove to each other that they
//! know the key before the descriptor is sent: see [`device_ipc_tcp`]. Messages are authenticated, not encrypted.

mod connection;
pub(crate) mod descriptor;
pub(crate) mod file;
pub(crate) mod input;
pub(crate) mod key;
pub(crate) mod message;

pub(crate) use connection::connect;

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::output::{UsageError, warning};
use descriptor::AnyDescriptor;
use device_ipc::limits::TEXT_PREFIX;
use input::Input;

/// The environment variable that contains a descriptor as text.
pub(crate) const DESCRIPTOR_VARIABLE: &str = "DEVICE_IPC_DESCRIPTOR";

/// Number of bytes that identify the kind of a descriptor.
const PREFIX_BYTES: u64 = 64;

/// Reads the text of a descriptor; stops with an error at the maximum length.
pub(crate) fn read_text(mut from: impl Read, name: &str) -> Result<String> {
    let mut text = Vec::new();
    let mut read = |text: &mut Vec<u8>, bytes| from.by_ref().take(bytes).read_to_end(text).map(drop);
    read(&mut text, PREFIX_BYTES).with_context(|| format!("cannot read {name}"))?;
    let max = descriptor::max_text_bytes(&text);
    read(&mut text, max + 1 - PREFIX_BYTES).with_context(|| format!("cannot read {name}"))?;
    if text.len() as u64 > max {
        bail!("{name} is not a descriptor: it is longer than the maximum of {max} B");
    }
    String::from_utf8(text).ok().with_context(|| format!("{name} is not a descriptor: it is not UTF-8 text"))
}

/// Reads the descriptor that an argument names (`@FILE`, `-` for standard input, or the text itself), and warns about text
/// on the command line, which other users can read.
pub(crate) fn descriptor_argument(argument: &str, timeout: Duration) -> Result<AnyDescriptor> {
    let descriptor = descriptor_of(argument, timeout)?;
    if argument != "-" && !argument.starts_with('@') {
        // Not an error: the token alone opens nothing, because the exporter verifies the user of the importer.
        warning(
            "every user of this machine can read this command line, and in it the descriptor with its secret (ps); use @FILE, \
             or '-' for standard input",
        );
    }
    Ok(descriptor)
}

/// Reads the descriptor that an argument names: `@FILE`, `-` for standard input, or the text itself. Invalid text is wrong
/// usage; an invalid file is not.
pub(crate) fn descriptor_of(argument: &str, timeout: Duration) -> Result<AnyDescriptor> {
    let (text, name) = match argument.strip_prefix('@') {
        None if argument == "-" => {
            let name = "standard input";
            (read_text(Input::new(std::io::stdin().lock(), timeout), name)?, name)
        }
        Some(path) => {
            let file = input::open(Path::new(path)).with_context(|| format!("cannot open {path}"))?;
            (read_text(Input::new(file, timeout), path)?, path)
        }
        None => {
            return AnyDescriptor::parse(argument).map_err(|error| {
                let is_text = argument.contains(TEXT_PREFIX);
                let hint = if is_text { "" } else { "; to read the descriptor from a file, use @FILE" };
                UsageError(format!("{error}{hint}")).into()
            });
        }
    };
    AnyDescriptor::parse(&text).with_context(|| format!("{name} contains no valid descriptor"))
}

/// Returns text of a peer without control characters and with a bounded length.
pub(crate) fn printable(text: &str) -> String {
    const MAX_CHARS: usize = 400;
    let shown = device_ipc::printable(&text.chars().take(MAX_CHARS).collect::<String>());
    if text.chars().nth(MAX_CHARS).is_some() { format!("{shown}…") } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_replaces_control_characters_and_truncates() {
        assert_eq!(printable("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(printable(&"x".repeat(1000)).chars().count(), 401);
    }

    #[test]
    fn text_that_is_too_long_or_not_utf8_is_rejected() {
        let error = read_text(std::io::repeat(b'a'), "it").unwrap_err().to_string();
        assert!(error.contains("longer than the maximum"), "{error}");
        assert!(read_text(&[0xff, 0xfe][..], "it").unwrap_err().to_string().contains("not UTF-8"));
        assert!(format!("{:#}", descriptor_of("/tmp/w.ipc", Duration::ZERO).unwrap_err()).contains("@FILE"));
    }
}
