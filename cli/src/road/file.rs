//! A descriptor in a file: written whole or not at all, for its owner only, and taken away at the end.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use device_ipc::Descriptor;

use super::descriptor::AnyDescriptor;
use super::input::{self, Input};
use super::read_text;
use crate::exporter::{self, Exporter};

/// How often it is looked whether the file is there.
const LOOK: Duration = Duration::from_millis(20);

/// A file that holds a descriptor. Dropping it removes the file, if it is still this one.
#[derive(Debug)]
pub(crate) struct DescriptorFile {
    path: PathBuf,
    text: String,
}

impl DescriptorFile {
    /// Writes the file. One that is there already is replaced only where it is what a sender that has ended left behind.
    pub(crate) fn write(path: &Path, descriptor: &Descriptor) -> Result<Self> {
        let shown = path.display();
        // Taken while it still means the same: the current directory may change.
        let path = std::path::absolute(path).with_context(|| format!("using the path {shown}"))?;
        let directory = path.parent().with_context(|| format!("{shown} is no name of a file"))?;
        let text = format!("{descriptor}\n");
        let replaces = is_left_over(&path)?;
        // Only its owner may read it.
        let mut file = tempfile::NamedTempFile::new_in(directory)
            .with_context(|| format!("making a file in {}", directory.display()))?;
        file.write_all(text.as_bytes()).with_context(|| format!("writing {shown}"))?;
        let named = if replaces { file.persist(&path) } else { file.persist_noclobber(&path) };
        named.map_err(|failed| failed.error).with_context(|| format!("naming the file {shown}"))?;
        Ok(Self { path, text })
    }
}

impl Drop for DescriptorFile {
    fn drop(&mut self) {
        // Another sender may have taken the name since.
        let ours = regular(&self.path).and_then(|mut file| {
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            Ok(text == self.text)
        });
        let ours = ours.unwrap_or(false);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            eprintln!("warning: {} could not be removed: {error}", self.path.display());
        }
    }
}

/// Opens a regular file, and nothing else: reading a pipe would wait, and take from it what is another process's.
fn regular(path: &Path) -> io::Result<File> {
    let file = input::open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(ErrorKind::AlreadyExists, "it is no regular file; take another name"))
}

/// May what is there be replaced? False where there is nothing.
fn is_left_over(path: &Path) -> Result<bool> {
    let shown = path.display();
    let file = match regular(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        other => other.with_context(|| format!("looking at {shown}"))?,
    };
    let text = read_text(file, &shown.to_string()).ok();
    let Some(descriptor) = text.and_then(|text| AnyDescriptor::parse(&text).ok()) else {
        bail!("{shown} is there already and holds no descriptor, so it is left as it is; take another name");
    };
    let pid = match exporter::find(&descriptor)? {
        Exporter::Answers(process) => process.pid,
        Exporter::Silent => descriptor.exporter().pid,
        Exporter::Unseen => return Ok(true),
    };
    bail!("process {pid} shares by {shown} already; stop it, or take another name")
}

/// Reads a descriptor's file, and waits for it where it is not there yet, or still empty.
pub(crate) fn read(path: &Path, patience: Duration, waiting: impl FnOnce()) -> Result<Descriptor> {
    let (end, shown) = (Instant::now() + patience, path.display());
    let mut waiting = Some(waiting);
    loop {
        let missing = match input::open(path) {
            Ok(file) => {
                let left = end.saturating_duration_since(Instant::now());
                let text = read_text(Input::new(file, left), &shown.to_string())?;
                if !text.trim().is_empty() {
                    let descriptor = AnyDescriptor::parse(&text).and_then(AnyDescriptor::of_one_tensor);
                    return descriptor.with_context(|| format!("{shown} holds no descriptor of a tensor"));
                }
                "is empty"
            }
            Err(error) if error.kind() == ErrorKind::NotFound => "is not there",
            Err(error) => return Err(error).with_context(|| format!("opening {shown}")),
        };
        if Instant::now() >= end {
            bail!(
                "{shown} {missing} after {} s of waiting; is 'device-ipc send --file {shown}' running?",
                patience.as_secs()
            );
        }
        if let Some(waiting) = waiting.take() {
            waiting();
        }
        // Looked for again and again: not every file system that containers share tells of new files.
        std::thread::sleep(LOOK);
    }
}
