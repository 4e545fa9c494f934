//! Input that may be a pipe: opened without waiting for a writer, and read with a deadline.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Opens a file for reading, without waiting for a writer if it is a pipe (mkfifo(1)).
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)
}

/// A file or standard input with a deadline for all reads.
pub(crate) struct Input<F> {
    file: F,
    timeout: Duration,
    deadline: Instant,
}

impl<F: Read + AsFd> Input<F> {
    pub(crate) fn new(file: F, timeout: Duration) -> Self {
        Self { file, timeout, deadline: Instant::now() + timeout }
    }
}

impl<F: Read + AsFd> Read for Input<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let time = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&time)) {
                Ok(0) if left.is_zero() => {
                    let seconds = self.timeout.as_secs_f64();
                    let why = format!("timed out after {seconds:.1} s: no process writes to it");
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
