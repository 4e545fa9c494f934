//! Lines on standard output, and bytes.

use std::fmt::Display;
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

    /// A reader that has closed the pipe is an error here: it has not seen all bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Output(output) => output.write_all(bytes).context("writing to standard output"),
            Self::File(file, path) => {
                file.write_all(bytes).with_context(|| format!("writing {}", path.display()))
            }
        }
    }

    pub(crate) fn finish(self) -> Result<()> {
        match self {
            Self::Output(mut output) => output.flush().context("writing to standard output"),
            Self::File(..) => Ok(()),
        }
    }
}
