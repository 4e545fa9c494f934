//! Descriptor files: written atomically, readable by their owner only, and removed when the sender exits.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use device_ipc::{AllowList, Descriptor};

use super::descriptor::AnyDescriptor;
use super::input::{self, Input};
use super::read_text;
use crate::arguments;
use crate::exporter::{self, ExporterState};
use crate::output::warning;

/// Interval between checks for the file.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A file that contains a descriptor. Dropping the guard removes the file, unless another process has replaced it.
#[derive(Debug)]
pub(crate) struct DescriptorFile {
    path: PathBuf,
    text: String,
}

impl DescriptorFile {
    /// Writes the file. Replaces an existing file only if it contains a descriptor whose exporter has exited.
    pub(crate) fn write(path: &Path, descriptor: &Descriptor) -> Result<Self> {
        let shown = path.display();
        // Made absolute now, because the current directory may change.
        let path = std::path::absolute(path).with_context(|| format!("cannot resolve the path {shown}"))?;
        let directory = path.parent().with_context(|| format!("{shown} does not name a file"))?;
        let text = format!("{descriptor}\n");
        let replace = is_stale(&path)?;
        // Temporary files are readable by their owner only.
        let mut file = tempfile::NamedTempFile::new_in(directory)
            .with_context(|| format!("cannot create a file in {}", directory.display()))?;
        file.write_all(text.as_bytes()).with_context(|| format!("cannot write {shown}"))?;
        let named = if replace { file.persist(&path) } else { file.persist_noclobber(&path) };
        named
            .map_err(|failed| failed.error)
            .with_context(|| format!("cannot rename the temporary file to {shown}"))?;
        Ok(Self { path, text })
    }
}

impl Drop for DescriptorFile {
    fn drop(&mut self) {
        // Another sender may have replaced the file.
        let ours = open_regular(&self.path).and_then(|mut file| {
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            Ok(text == self.text)
        });
        let ours = ours.unwrap_or(false);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            warning(format_args!("cannot remove {}: {error}", self.path.display()));
        }
    }
}

/// Opens a regular file; any other kind is an error, as reading a pipe would block and consume data of another process.
fn open_regular(path: &Path) -> io::Result<File> {
    let file = input::open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(ErrorKind::AlreadyExists, "it is not a regular file; choose another path"))
}

/// Returns whether the file exists and contains a descriptor whose exporter has exited. Fails for any other file.
fn is_stale(path: &Path) -> Result<bool> {
    let shown = path.display();
    let file = match open_regular(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        other => other.with_context(|| format!("cannot read {shown}"))?,
    };
    let text = read_text(file, &shown.to_string()).ok();
    let Some(descriptor) = text.and_then(|text| AnyDescriptor::parse(&text).ok()) else {
        bail!(
            "{shown} already exists and does not contain a descriptor, so it is not replaced; choose another path"
        );
    };
    let pid = match exporter::find(&descriptor, &AllowList::own_user())? {
        ExporterState::Answered(process) => process.pid,
        ExporterState::Unresponsive => descriptor.exporter().pid,
        ExporterState::NotFound => return Ok(true),
    };
    bail!(
        "{shown} is in use by process {pid}, which shares memory; stop that process, or choose another path"
    )
}

/// Reads a descriptor file; waits until the file exists and is not empty.
pub(crate) fn read(path: &Path, timeout: Duration, on_wait: impl FnOnce()) -> Result<Descriptor> {
    let (end, shown) = (Instant::now() + timeout, path.display());
    let mut on_wait = Some(on_wait);
    loop {
        let missing = match input::open(path) {
            Ok(file) => {
                let left = end.saturating_duration_since(Instant::now());
                let text = read_text(Input::new(file, left), &shown.to_string())?;
                if !text.trim().is_empty() {
                    let any = AnyDescriptor::parse(&text)
                        .with_context(|| format!("{shown} contains no valid descriptor"))?;
                    return any
                        .into_single_tensor()
                        .with_context(|| format!("{shown} does not contain the descriptor of a tensor"));
                }
                "is empty"
            }
            Err(error) if error.kind() == ErrorKind::NotFound => "does not exist",
            Err(error) => return Err(error).with_context(|| format!("cannot open {shown}")),
        };
        if Instant::now() >= end {
            bail!(
                "timed out after {}: {shown} {missing}; check that 'device-ipc send --file {shown}' is running",
                arguments::shown(timeout)
            );
        }
        if let Some(on_wait) = on_wait.take() {
            on_wait();
        }
        // Polled, because not every file system that containers share supports inotify.
        std::thread::sleep(POLL_INTERVAL);
    }
}
