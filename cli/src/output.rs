//! Lines on standard output, and bytes.

use std::fmt::{self, Display};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Stdout, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use device_ipc::printable;
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::Serialize;

/// Prints a line. A reader that has closed the pipe (`| head`) has seen what it wanted.
pub(crate) fn line(text: impl Display) -> Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("writing to standard output")
        }
        _ => Ok(()),
    }
}

/// Bytes for a file, or for standard output.
pub(crate) enum Raw {
    Output(Stdout),
    File(File, PathBuf),
}

impl Raw {
    /// Makes the file anew; `-` is standard output.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Self::Output(std::io::stdout()));
        }
        let file = create(path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self::File(file, path.to_owned()))
    }

    /// A reader that has closed the pipe ends the program, without a word ([`OutputClosed`]).
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Output(output) => said(output.write_all(bytes)),
            Self::File(file, path) => {
                file.write_all(bytes).with_context(|| format!("writing {}", path.display()))
            }
        }
    }

    pub(crate) fn finish(self) -> Result<()> {
        match self {
            Self::Output(mut output) => said(output.flush()),
            Self::File(..) => Ok(()),
        }
    }
}

/// Creates a file, or opens a pipe that a process reads from; open(2) does not wait for such a process.
fn create(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NXIO) => std::io::Error::new(error.kind(), "it is a pipe that no process reads from"),
        _ => error,
    })?;
    rustix::io::ioctl_fionbio(&file, false)?;
    Ok(file)
}

/// Prints a JSON document. Characters of peers' names that a terminal would act upon are escaped, as JSON permits.
pub(crate) fn json(document: &impl Serialize) -> Result<()> {
    line(escaped(&serde_json::to_string_pretty(document)?))
}

fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        let mut bytes = [0; 4];
        if c == '\n' || printable(c.encode_utf8(&mut bytes)).starts_with(c) {
            text.push(c);
        } else {
            let mut units = [0; 2];
            c.encode_utf16(&mut units).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        }
    }
    text
}

/// Who read standard output has closed it before all bytes were there (`| head`). Nobody needs to be told.
#[derive(Debug)]
pub(crate) struct OutputClosed;

impl Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for OutputClosed {}

fn said(written: std::io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        other => other.context("writing to standard output"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_document_cannot_act_on_a_terminal_and_keeps_its_values() {
        let name = "a\u{9b}31mb\u{202e}c\u{e0041}ü";
        let text = escaped(&serde_json::to_string_pretty(&[name]).unwrap());
        assert_eq!(text, "[\n  \"a\\u009b31mb\\u202ec\\udb40\\udc41ü\"\n]");
        assert_eq!(serde_json::from_str::<Vec<String>>(&text).unwrap(), [name]);
    }
}
