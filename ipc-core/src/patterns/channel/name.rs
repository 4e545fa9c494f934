//! Names of channels and their sockets.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::model::error::{Error, Result};
use crate::os::clock;
use crate::transport::socket::{self, PeerSocket, peer_credentials};
use crate::transport::socket_file::{SocketFile, is_own_socket, refuses_connections};
use crate::transport::{Deadline, UserName, abstract_names, is_own_user, names_in, program_of};
use crate::wire::{BrokerAddress, MAX_ADDRESS_BYTES};

/// The prefix of the socket names of channels. Brokers use another one, so that listing exports does not contact channels.
const PREFIX: &str = "device-ipc.";

/// Maximum length of a name in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Maximum time to wait for the lock of a name. Other processes of this user hold it for less than 1 ms.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between attempts to lock a name.
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// Returns the socket address of the listener with this user and name.
pub(super) fn address(name: &str, uid: u32, directory: Option<&Path>) -> Result<BrokerAddress> {
    let invalid = |why: &str| Error::invalid_input(format!("channel name {name:?}"), why);
    if name.is_empty() {
        return Err(invalid("it is empty"));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(invalid("it is longer than 64 B"));
    }
    if name.contains(':') {
        return Err(invalid("a TCP address requires a channel over TCP, with a key"));
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return Err(invalid("it may contain only ASCII letters, digits, dots, hyphens and underscores"));
    }
    let socket = format!("{PREFIX}{uid}.{name}");
    let address = match directory {
        None => BrokerAddress::Abstract(socket.into_bytes().into()),
        Some(directory) => {
            let path = std::path::absolute(directory)
                .map_err(|error| Error::io("finding the socket directory", error))?;
            BrokerAddress::Path(path.join(socket).into())
        }
    };
    if address.bytes().len() > MAX_ADDRESS_BYTES {
        return Err(Error::io(format!("using the socket address {address}"), Errno::NAMETOOLONG));
    }
    Ok(address)
}

/// Lists the users and names of the listeners of this network namespace, and of the directory if there is one, as their
/// addresses state them. Contacts no process.
pub(crate) fn listening_names(directory: Option<&Path>) -> Result<Vec<(u32, String)>> {
    let is_ours = |name: &[u8]| name.starts_with(PREFIX.as_bytes());
    let mut addresses = abstract_names(is_ours)?;
    if let Some(directory) = directory {
        addresses.extend(names_in(directory, is_ours)?);
    }
    let parsed = addresses.iter().filter_map(|address| {
        let (user, name) = std::str::from_utf8(address).ok()?.strip_prefix(PREFIX)?.split_once('.')?;
        Some((user.parse().ok()?, name.to_owned()))
    });
    Ok(parsed.collect())
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct ListeningSocket {
    pub(super) socket: PeerSocket,
    /// Whether the kernel refuses file descriptors that peers send before they are accepted.
    pub(super) refuses_fds: bool,
}

/// Creates the listening socket of a name.
pub(super) fn listen(name: &str, address: &BrokerAddress) -> Result<(ListeningSocket, Option<SocketFile>)> {
    let failed = |error: io::Error| Error::io(format!("listening at {address}"), error);
    let target = address.to_socket_address()?;
    let _lock = match address {
        BrokerAddress::Path(path) => Some(NameLock::acquire(path)?),
        BrokerAddress::Abstract(_) => None,
    };
    let socket = socket::new_socket().map_err(|error| failed(error.into()))?;
    let mut bound = rustix::net::bind(&socket, &target);
    if bound == Err(Errno::ADDRINUSE)
        && let BrokerAddress::Path(path) = address
        && remove_stale(path)?
    {
        bound = rustix::net::bind(&socket, &target);
    }
    match bound {
        Ok(()) => {}
        Err(Errno::ADDRINUSE) => return Err(in_use(name, address)),
        Err(error) => return Err(failed(error.into())),
    }
    let refuses_fds = socket::listen(socket.as_fd(), BACKLOG).map_err(|error| failed(error.into()))?;
    let file = match address {
        BrokerAddress::Path(path) => Some(SocketFile::of(path).map_err(failed)?),
        BrokerAddress::Abstract(_) => None,
    };
    // A listening socket itself receives no packets.
    Ok((ListeningSocket { socket: PeerSocket::new(socket, false), refuses_fds }, file))
}

/// Takes over the listening socket of a name, which another process of this user listens at.
pub(super) fn take_over(
    address: &BrokerAddress,
    socket: OwnedFd,
) -> Result<(ListeningSocket, Option<SocketFile>)> {
    let failed = |error: io::Error| Error::io(format!("taking over the socket at {address}"), error);
    let is_listening = rustix::net::sockopt::socket_acceptconn(&socket) == Ok(true);
    let bound = rustix::net::getsockname(&socket).map_err(|error| failed(error.into()))?;
    if !is_listening || bound != address.to_socket_address()?.into() {
        let what =
            "the peer handed over another socket; use the same name and socket directory in both processes";
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, what)));
    }
    rustix::io::ioctl_fionbio(&socket, true).map_err(|error| failed(error.into()))?;
    let mut listening = ListeningSocket { socket: PeerSocket::new(socket, false), refuses_fds: false };
    let file = listening.become_listener(address)?;
    Ok((listening, file))
}

impl ListeningSocket {
    /// Makes this process the listener whose credentials the kernel reports, and returns the socket's file.
    ///
    /// Connections that have not been accepted state the former process, so they are closed: their processes connect again.
    pub(super) fn become_listener(&mut self, address: &BrokerAddress) -> Result<Option<SocketFile>> {
        let failed = |error: io::Error| Error::io(format!("listening at {address}"), error);
        self.refuses_fds = socket::listen(self.socket.fd(), BACKLOG).map_err(|error| failed(error.into()))?;
        for _ in 0..=BACKLOG {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(self.socket.fd(), flags) {
                Ok(former) => drop(PeerSocket::new(former, true)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => break,
            }
        }
        match address {
            BrokerAddress::Path(path) => SocketFile::of(path).map(Some).map_err(failed),
            BrokerAddress::Abstract(_) => Ok(None),
        }
    }
}

/// Removes the stale socket of a process of this user that was killed. Returns `false` if a process listens there.
///
/// The caller holds the lock of the name: without it, a listener could remove a socket that another one has just bound.
fn remove_stale(path: &Path) -> Result<bool> {
    let failed = |error: io::Error| Error::io(format!("listening at {}", path.display()), error);
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        // The listener has just removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(failed(error)),
    };
    if !metadata.file_type().is_socket() {
        let what =
            "the path is in use by a file that is not a socket; move the file, or listen under another name";
        return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, what)));
    }
    if !refuses_connections(path) {
        return Ok(false);
    }
    if !is_own_socket(&metadata) {
        let owner = UserName(metadata.uid());
        let what = format!(
            "the path is in use by a stale socket of {owner}; have it removed, or listen under another name"
        );
        return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, what)));
    }
    fs::remove_file(path).map_err(failed)?;
    Ok(true)
}

/// A lock among the processes of this user for inspecting and replacing the socket of a name.
///
/// It locks a file that only this user can open, not the directory, which every user with read permission could lock.
#[derive(Debug)]
struct NameLock {
    path: PathBuf,
    _file: fs::File,
}

impl NameLock {
    fn acquire(socket: &Path) -> Result<Self> {
        let path = lock_path(socket);
        let failed = |error: io::Error| Error::io(format!("locking {}", path.display()), error);
        let deadline = Deadline::after(LOCK_TIMEOUT);
        loop {
            let file = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
                .open(&path)
                .map_err(failed)?;
            let metadata = file.metadata().map_err(failed)?;
            if !metadata.is_file() || !is_own_user(metadata.uid()) {
                let what = "it is not a regular file of this user; remove it";
                return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, what)));
            }
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The previous holder of the lock may have removed the file.
                Ok(()) if is_same_file(&path, &metadata) => return Ok(Self { path, _file: file }),
                Ok(()) | Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
            if deadline.left().is_zero() {
                let detail = format!("; another process of this user holds the lock on {}", path.display());
                return Err(deadline.passed("the lock of a channel's name", &detail));
            }
            clock::sleep(LOCK_RETRY);
        }
    }
}

impl Drop for NameLock {
    fn drop(&mut self) {
        // The file is removed before the unlock, so that no process locks a file that is about to be removed.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns whether the path still refers to the opened file.
fn is_same_file(path: &Path, metadata: &fs::Metadata) -> bool {
    fs::symlink_metadata(path).is_ok_and(|now| now.dev() == metadata.dev() && now.ino() == metadata.ino())
}

/// Returns the path of the lock file. No socket name begins with a dot.
fn lock_path(socket: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(socket.file_name().unwrap_or_default());
    name.push(".lock");
    socket.with_file_name(name)
}

/// Returns the error for a name in use, with the listener's process as the kernel reports it to a connection.
fn in_use(name: &str, address: &BrokerAddress) -> Error {
    let listener = socket::connect_to(address).ok().and_then(|socket| peer_credentials(&socket).ok());
    let pid = listener.map_or(0, |credentials| credentials.pid);
    Error::ChannelNameInUse { name: name.to_owned(), pid, program: program_of(pid) }
}

#[cfg(test)]
mod tests;
