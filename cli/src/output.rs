//! Lines, JSON documents and raw bytes on standard output or in files.

use std::fmt::{self, Display};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Stdout, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anstream::AutoStream;
use anstream::stream::RawStream;
use anstyle::{AnsiColor, Style};
use anyhow::{Context, Result};
use device_ipc::front_end::printable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::Serialize;
use serde_json::Value;

/// Whether notices and warnings are not printed.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Sets whether [`notice`] and [`warning`] print nothing.
pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// Returns whether only results and errors are printed.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// The color of errors and problems.
pub const RED: Style = AnsiColor::Red.on_default().bold();

/// The color of warnings.
pub const YELLOW: Style = AnsiColor::Yellow.on_default().bold();

/// The color of a check without findings.
pub const GREEN: Style = AnsiColor::Green.on_default();

/// Whether a signal has asked the program to end.
static STOPPING: AtomicBool = AtomicBool::new(false);

/// Time between two looks whether the program is to end, while the reader of an output does not read.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The number of bytes that a pipe takes at once when it is ready (pipe(7)).
const PIPE_BUF: usize = 4096;

/// Notes that the program is to end: from now on it omits lines that it could print only after their reader has read earlier ones.
pub fn set_stopping() {
    STOPPING.store(true, Ordering::Release);
}

/// Writes a line. Waits for the reader of a full pipe, but not when the program is to end.
fn print(mut to: impl AsFd + RawStream, text: impl Display) -> std::io::Result<()> {
    let mut line = AutoStream::new(Vec::new(), AutoStream::choice(&to));
    writeln!(line, "{text}")?;
    // A pipe that is ready takes as many bytes at once.
    for part in line.into_inner().chunks(PIPE_BUF) {
        loop {
            let mut polled = [PollFd::new(&to, PollFlags::OUT)];
            match poll(&mut polled, Some(&LOOK)) {
                Ok(0) if STOPPING.load(Ordering::Acquire) => return Ok(()),
                Ok(0) | Err(Errno::INTR) => {}
                // The write reports what is wrong.
                Ok(_) | Err(_) => break,
            }
        }
        to.write_all(part)?;
        to.flush()?;
    }
    Ok(())
}

/// Prints a line to standard error.
pub fn error_line(text: impl Display) {
    let _ = print(std::io::stderr(), text);
}

/// Prints a line to standard error, unless the program is [quiet](set_quiet).
pub fn notice(text: impl Display) {
    if !is_quiet() {
        error_line(text);
    }
}

/// Prints a warning to standard error, unless the program is [quiet](set_quiet).
pub fn warning(text: impl Display) {
    if !is_quiet() {
        error_line(format_args!("{YELLOW}warning:{YELLOW:#} {text}"));
    }
}

/// Prints a line. Escape sequences of colors are removed where standard output does not take them. A closed pipe (`| head`)
/// is not an error: its reader has read enough.
///
/// # Errors
///
/// Fails if standard output cannot be written for another reason.
pub fn line(text: impl Display) -> Result<()> {
    match write_line(text) {
        Err(error) if error.is::<OutputClosed>() => Ok(()),
        other => other,
    }
}

/// Prints a line as [`line()`] does.
///
/// # Errors
///
/// Fails as [`line()`] does, and with [`OutputClosed`] if the reader of standard output has closed it.
pub fn write_line(text: impl Display) -> Result<()> {
    check_stdout(print(std::io::stdout(), text))
}

/// A destination of raw bytes: a file, or standard output.
pub struct RawOutput(Destination);

enum Destination {
    Stdout(Stdout),
    File(File, PathBuf),
}

impl RawOutput {
    /// Creates or truncates the file at this path; `-` is standard output.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be created, or if it is a pipe without a reader.
    pub fn create(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Self(Destination::Stdout(std::io::stdout())));
        }
        let file = create(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(Destination::File(file, path.to_owned())))
    }

    /// Writes all bytes.
    ///
    /// # Errors
    ///
    /// Fails with [`OutputClosed`] if the reader of standard output has closed it.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.0 {
            Destination::Stdout(stdout) => check_stdout(stdout.write_all(bytes)),
            Destination::File(file, path) => {
                file.write_all(bytes).with_context(|| format!("cannot write {}", path.display()))
            }
        }
    }

    /// Flushes standard output.
    ///
    /// # Errors
    ///
    /// Fails as [`write`](Self::write) does.
    pub fn finish(self) -> Result<()> {
        match self.0 {
            Destination::Stdout(mut stdout) => check_stdout(stdout.flush()),
            Destination::File(..) => Ok(()),
        }
    }
}

/// Creates a file, or opens a pipe that has a reader; open(2) does not wait for a reader.
fn create(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NXIO) => {
            std::io::Error::new(error.kind(), "it is a pipe without a reader; start the reader first")
        }
        _ => error,
    })?;
    rustix::io::ioctl_fionbio(&file, false)?;
    Ok(file)
}

/// Prints a JSON document. Control characters in names of peers are escaped, as JSON permits.
///
/// # Errors
///
/// Fails as [`line()`] does.
pub fn json(document: &impl Serialize) -> Result<()> {
    line(escaped(&serde_json::to_string_pretty(document)?))
}

/// Escapes the control characters of a JSON text, except line feeds.
pub fn escaped(json: &str) -> String {
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

/// Prints a JSON document, or for people the same as indented lines `name: value`.
///
/// # Errors
///
/// Fails as [`line()`] does.
pub fn document(document: &Value, as_json: bool) -> Result<()> {
    if as_json {
        return json(document);
    }
    let mut text = String::new();
    write_indented(document, 0, &mut text);
    line(text.trim_end())
}

fn write_indented(value: &Value, depth: usize, text: &mut String) {
    let mut entry = |name: &str, value: &Value| {
        let indent = "  ".repeat(depth);
        let nested = match value {
            Value::Object(fields) => !fields.is_empty(),
            Value::Array(items) => items.iter().any(|item| item.is_object() || item.is_array()),
            _ => false,
        };
        if nested {
            text.push_str(&format!("{indent}{name}:\n"));
            write_indented(value, depth + 1, text);
        } else {
            let value = match value {
                Value::String(value) => printable(value),
                other => escaped(&other.to_string()),
            };
            text.push_str(&format!("{indent}{name}: {value}\n"));
        }
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| entry(&printable(name), value)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, value)| entry(&index.to_string(), value))
        }
        other => text.push_str(&escaped(&other.to_string())),
    }
}

/// An error: a value or a combination of options that no machine accepts. The program exits with code 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Returns an error as a [`UsageError`] with the texts of its chain.
pub fn as_usage(error: impl Into<anyhow::Error>) -> anyhow::Error {
    UsageError(format!("{:#}", error.into())).into()
}

/// An error: the reader closed standard output before all bytes were written (`| head`). The program fails without a
/// message.
#[derive(Debug)]
pub struct OutputClosed;

impl Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader closed standard output")
    }
}

impl std::error::Error for OutputClosed {}

fn check_stdout(written: std::io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        other => other.context("cannot write to standard output"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_document_escapes_control_characters_and_keeps_values() {
        let name = "a\u{9b}31mb\u{202e}c\u{e0041}ü";
        let text = escaped(&serde_json::to_string_pretty(&[name]).unwrap());
        assert_eq!(text, "[\n  \"a\\u009b31mb\\u202ec\\udb40\\udc41ü\"\n]");
        assert_eq!(serde_json::from_str::<Vec<String>>(&text).unwrap(), [name]);
    }

    #[test]
    fn document_for_people_is_indented_and_printable() {
        let value =
            serde_json::json!({ "a": { "b": "x\u{1b}[2J", "c": [1, 2], "d": [] }, "e": [{ "f": null }] });
        let mut text = String::new();
        write_indented(&value, 0, &mut text);
        assert_eq!(text, "a:\n  b: x\u{fffd}[2J\n  c: [1,2]\n  d: []\ne:\n  0:\n    f: null\n");
    }
}
