//! Lines on standard output.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

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
