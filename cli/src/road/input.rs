//! Input that may be a pipe: opened without waiting for a process that writes to it, and read with a deadline.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Opens a file for reading. A pipe that no process writes to (mkfifo(1)) is opened too, as open(2) does not wait for one.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)
}

/// A file or standard input, read until a deadline.
pub(crate) struct Input<F> {
    file: F,
    after: Duration,
    until: Instant,
}

impl<F: Read + AsFd> Input<F> {
    pub(crate) fn new(file: F, patience: Duration) -> Self {
        Self { file, after: patience, until: Instant::now() + patience }
    }
}

impl<F: Read + AsFd> Read for Input<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            let time = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&time)) {
                Ok(0) if left.is_zero() => {
                    let after = self.after.as_secs_f64();
                    let why = format!("timed out after {after:.1} s: no process writes to it");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            match self.file.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}
