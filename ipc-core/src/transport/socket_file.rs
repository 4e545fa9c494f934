//! Listening sockets in a directory that other processes, and other users, may share.
//!
//! Only sockets of this process's user with a name of the exact form below are ever removed: a directory may hold anything
//! else, and connect(2) reports `ECONNREFUSED` for a regular file too.
//!
//! A file is removed with its listener, or when the process exits in order (exit(3), or a return from `main`). Files of
//! processes that are killed are removed by the next listener in the directory.

#![allow(unsafe_code, reason = "atexit(3), which the standard library has no call for")]

use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::allow::is_own_user;
use super::socket;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::os::process::Owner;
use crate::wire::{BrokerAddress, MAX_ADDRESS_BYTES, SOCKET_DIR_VARIABLE, random_bytes};

/// The prefix of the names of all brokers' sockets.
const PUBLISHED: &str = "device-ipc-";

/// The prefix of the name of a broker's socket until it listens. As long as [`PUBLISHED`], so that both names fit.
const UNPUBLISHED: &str = "device-ipc~";

/// Hexadecimal digits at the end of a name.
const RANDOM_DIGITS: usize = 16;

/// Decimal digits of a process id, at most.
const MAX_PID_DIGITS: usize = 10;

/// The age from which a socket that was never published is abandoned. Its maker takes microseconds to publish it, and
/// starts again where it was stopped for longer and the socket has been removed meanwhile.
const ABANDONED: Duration = Duration::from_secs(60);

/// Maximum number of times that a maker starts again.
const ATTEMPTS: usize = 3;

/// The name of a broker's socket: `device-ipc-PID-RANDOM`.
#[derive(Debug)]
pub(super) struct SocketName(String);

impl SocketName {
    /// Draws a new name.
    pub(super) fn new() -> Result<Self> {
        let random = data_encoding::HEXLOWER.encode(&random_bytes::<{ RANDOM_DIGITS / 2 }>()?);
        Ok(Self(format!("{}-{random}", std::process::id())))
    }

    /// Returns the name under which importers connect.
    pub(super) fn published(&self) -> String {
        format!("{PUBLISHED}{}", self.0)
    }

    fn unpublished(&self) -> String {
        format!("{UNPUBLISHED}{}", self.0)
    }

    /// Returns whether this is the name of a broker's socket that importers connect to.
    pub(super) fn is_published(name: &[u8]) -> bool {
        has_form(name, PUBLISHED)
    }

    fn is_unpublished(name: &[u8]) -> bool {
        has_form(name, UNPUBLISHED)
    }
}

fn has_form(name: &[u8], prefix: &str) -> bool {
    let Some(rest) = name.strip_prefix(prefix.as_bytes()) else { return false };
    let Some(at) = rest.iter().position(|byte| *byte == b'-') else { return false };
    let (pid, random) = (&rest[..at], &rest[at + 1..]);
    (1..=MAX_PID_DIGITS).contains(&pid.len())
        && pid.iter().all(u8::is_ascii_digit)
        && random.len() == RANDOM_DIGITS
        && random.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The files to remove when the process exits.
static FILES: Mutex<Vec<(Owner, PathBuf, Identity)>> = Mutex::new(Vec::new());

/// Device and inode of a file.
type Identity = (u64, u64);

/// The file of a listening socket.
pub(crate) struct SocketFile {
    path: PathBuf,
    file: Identity,
}

impl SocketFile {
    /// Returns the socket file of this process at this path. It is removed when the process exits, if not before.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler stays for the life of the process, as this library does, and waits for no lock.
            unsafe { libc::atexit(remove_all) };
        });
        let file = identity(&fs::symlink_metadata(path)?);
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        files.push((Owner::current(), path.to_owned(), file));
        Ok(Self { path: path.to_owned(), file })
    }

    /// Returns the path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the file is still that of this socket.
    pub(crate) fn is_in_place(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|now| identity(&now) == self.file)
    }

    /// Leaves the file to another process, which has taken the socket over.
    pub(crate) fn leave(&self) {
        FILES.lock().unwrap_or_else(PoisonError::into_inner).retain(|(_, _, file)| *file != self.file);
    }

    /// Removes the file, unless another one has taken its place. To be called while the socket still listens: until then no
    /// process takes it for a socket that was left behind.
    pub(crate) fn remove(&self) {
        self.leave();
        remove_if_same(&self.path, self.file);
    }
}

/// Other threads still run, and one may hold the lock: a forked child's copy of it stays held for ever.
extern "C" fn remove_all() {
    let Ok(files) = FILES.try_lock() else { return };
    for (_, path, file) in files.iter().filter(|(owner, ..)| owner.is_here()) {
        remove_if_same(path, *file);
    }
}

fn remove_if_same(path: &Path, file: Identity) {
    if fs::symlink_metadata(path).is_ok_and(|now| identity(&now) == file) {
        let _ = fs::remove_file(path);
    }
}

impl fmt::Debug for SocketFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SocketFile").field(&self.path).finish()
    }
}

fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

/// Creates a socket in the directory. It gets its name when it listens, so that no process sees it refuse connections and
/// takes it for the socket of a dead process. The flag says whether the kernel refuses descriptors that others send to it.
pub(super) fn listen_in(directory: &Path, backlog: i32) -> Result<(OwnedFd, bool, SocketFile)> {
    let mut attempt = 1;
    loop {
        let name = SocketName::new()?;
        let (path, unpublished) = (directory.join(name.published()), directory.join(name.unpublished()));
        let address = BrokerAddress::Path(path.as_path().into());
        let failed = |error: io::Error| Error::io(format!("listening at {address}"), error);
        if address.bytes().len() > MAX_ADDRESS_BYTES {
            return Err(Error::io(
                format!(
                    "listening at {address}, whose path of {} B exceeds the limit of {MAX_ADDRESS_BYTES} B for a socket \
                     (set {SOCKET_DIR_VARIABLE} to a shorter directory)",
                    address.bytes().len()
                ),
                Errno::NAMETOOLONG,
            ));
        }
        let target = BrokerAddress::Path(unpublished.as_path().into()).to_socket_address()?;
        let socket = socket::new_socket().map_err(|error| failed(error.into()))?;
        rustix::net::bind(&socket, &target).map_err(|error| {
            Error::io(
                format!(
                    "listening at {address} (the directory is that of {SOCKET_DIR_VARIABLE}, unless the program sets one)"
                ),
                error,
            )
        })?;
        kill_point!("listener:bound");
        let published =
            socket::listen(socket.as_fd(), backlog).map_err(io::Error::from).and_then(|refuses_fds| {
                fs::rename(&unpublished, &path)?;
                Ok((refuses_fds, SocketFile::of(&path)?))
            });
        match published {
            Ok((refuses_fds, file)) => return Ok((socket, refuses_fds, file)),
            // This process was stopped for so long that another one has removed the socket as abandoned.
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempt < ATTEMPTS => attempt += 1,
            Err(error) => {
                let _ = fs::remove_file(&unpublished);
                return Err(failed(error));
            }
        }
    }
}

/// Removes the broker sockets that processes of this user left in the directory when they were killed.
pub(super) fn sweep(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let unpublished = SocketName::is_unpublished(name.as_bytes());
        if !unpublished && !SocketName::is_published(name.as_bytes()) {
            continue;
        }
        let path = directory.join(name);
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if !is_own_socket(&metadata) || unpublished && !is_abandoned(&metadata) {
            continue;
        }
        if refuses_connections(&path) {
            SocketFile { file: identity(&metadata), path }.remove();
        }
    }
}

fn is_abandoned(metadata: &Metadata) -> bool {
    let age = metadata.modified().ok().and_then(|made| made.elapsed().ok());
    age.is_some_and(|age| age >= ABANDONED)
}

/// Returns whether the file, which is no followed link, is a socket of this process's user.
pub(crate) fn is_own_socket(metadata: &Metadata) -> bool {
    metadata.file_type().is_socket() && is_own_user(metadata.uid())
}

/// Returns whether no process listens at this socket.
pub(crate) fn refuses_connections(path: &Path) -> bool {
    let connected = socket::connect_to(&BrokerAddress::Path(path.into()));
    matches!(connected, Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests;
