//! Transports of a descriptor between two terminals: a file, or text. Text also passes through a pipe, for example of ssh.
//!
//! A descriptor contains a secret, the token of the export.

pub(crate) mod descriptor;
pub(crate) mod file;
pub(crate) mod input;

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

/// Reads the text of a descriptor: a line. Its writer may keep a pipe open. Stops with an error at the maximum length.
pub(crate) fn read_text(mut from: impl Read, name: &str) -> Result<String> {
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let read = from.read(&mut buffer).with_context(|| format!("cannot read {name}"))?;
        text.extend_from_slice(&buffer[..read]);
        let max = descriptor::max_text_bytes(&text);
        if text.len() as u64 > max {
            bail!("{name} is not a descriptor: it is longer than the maximum of {max} B");
        }
        if read == 0 || text.trim_ascii_start().contains(&b'\n') {
            break;
        }
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
    let shown = device_ipc::front_end::printable(&text.chars().take(MAX_CHARS).collect::<String>());
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
