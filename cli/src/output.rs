//! Lines on standard output, and bytes.

use std::fmt::{self, Display};
use std::fs::File;
use std::io::{ErrorKind, Stdout, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

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
        let file = File::create(path).with_context(|| format!("making {}", path.display()))?;
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
