//! The roads that a descriptor takes between two terminals: a file, text, or TCP with a shared key.
//!
//! A descriptor holds a secret, the export's token. By TCP it is sent to nobody but a process that has proved to know the
//! key, and the receiver takes it from nobody else: see [`handshake`]. What is sent is authenticated and not encrypted.

pub(crate) mod descriptor;
pub(crate) mod file;
pub(crate) mod handshake;
pub(crate) mod input;
pub(crate) mod key;
pub(crate) mod message;
pub(crate) mod sealed;
mod wire;

pub(crate) use wire::{Wire, connect};

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use descriptor::AnyDescriptor;
use input::Input;

/// A descriptor as text, for those who start processes.
pub(crate) const DESCRIPTOR_VARIABLE: &str = "DEVICE_IPC_DESCRIPTOR";

/// Enough to see which kind of descriptor it is.
const BEGINNING: u64 = 64;

/// Reads a descriptor's text; one that is too long is refused before it is read.
pub(crate) fn read_text(mut from: impl Read, name: &str) -> Result<String> {
    let mut text = Vec::new();
    let mut read = |text: &mut Vec<u8>, bytes| from.by_ref().take(bytes).read_to_end(text).map(drop);
    read(&mut text, BEGINNING).with_context(|| format!("reading {name}"))?;
    let longest = descriptor::longest(&text);
    read(&mut text, longest + 1 - BEGINNING).with_context(|| format!("reading {name}"))?;
    if text.len() as u64 > longest {
        bail!("{name} holds more than {longest} bytes, and no descriptor is as long");
    }
    String::from_utf8(text).ok().with_context(|| format!("{name} holds no text, hence no descriptor"))
}

/// Reads the descriptor that an argument names: `@FILE`, `-` for standard input, or the text itself, which other users see.
pub(crate) fn descriptor_argument(argument: &str, patience: Duration) -> Result<AnyDescriptor> {
    let descriptor = descriptor_of(argument, patience)?;
    if argument != "-" && !argument.starts_with('@') {
        // It stays permitted: the token alone opens nothing, as the exporter asks the kernel for the importer's user.
        eprintln!(
            "warning: every user of this machine can read the descriptor, with its secret, in this command line (ps); give \
             @FILE, or '-' for standard input, instead"
        );
    }
    Ok(descriptor)
}

/// Reads a descriptor: `@FILE`, `-` for standard input, or the text itself.
pub(crate) fn descriptor_of(argument: &str, patience: Duration) -> Result<AnyDescriptor> {
    let text = match argument.strip_prefix('@') {
        None if argument == "-" => {
            let name = "standard input";
            read_text(Input::new(std::io::stdin().lock(), patience), name)?
        }
        Some(path) => {
            let file = input::open(Path::new(path)).with_context(|| format!("opening {path}"))?;
            read_text(Input::new(file, patience), path)?
        }
        None => argument.to_owned(),
    };
    AnyDescriptor::parse(&text)
}

/// A peer's words, fit for a terminal, and of a bounded length.
pub(crate) fn printable(text: &str) -> String {
    const LONGEST: usize = 400;
    let shown = device_ipc::printable(&text.chars().take(LONGEST).collect::<String>());
    if text.chars().nth(LONGEST).is_some() { format!("{shown}…") } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_words_cannot_act_on_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(printable(&"x".repeat(1000)).chars().count(), 401);
    }

    #[test]
    fn what_is_too_long_or_no_text_is_refused() {
        let error = read_text(std::io::repeat(b'a'), "it").unwrap_err().to_string();
        assert!(error.contains("no descriptor is as long"), "{error}");
        assert!(read_text(&[0xff, 0xfe][..], "it").unwrap_err().to_string().contains("no text"));
        assert!(format!("{:#}", descriptor_of("/tmp/w.ipc", Duration::ZERO).unwrap_err()).contains("@FILE"));
    }
}
