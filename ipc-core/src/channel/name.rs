//! Names of channels, and the sockets behind them.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::broker::socket::{self, peer_credentials};
use crate::broker::{BrokerAddress, MAX_ADDRESS_BYTES};
use crate::error::{Error, Result};

/// What the names of all sockets of channels begin with. Brokers' begin otherwise, so that a list of exports asks no channel.
const PREFIX: &str = "device-ipc.";

/// The longest name in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Where the listener of this user and name is to be found.
pub(super) fn address(name: &str, uid: u32, directory: Option<&Path>) -> Result<BrokerAddress> {
    let invalid = |why| Error::InvalidChannelName { name: name.to_owned(), why };
    if name.is_empty() {
        return Err(invalid("it is empty"));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(invalid("it has more than 64 bytes"));
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return Err(invalid("names are made of letters, digits, dots, hyphens and underscores"));
    }
    let socket = format!("{PREFIX}{uid}.{name}");
    let address = match directory {
        None => BrokerAddress::Abstract(socket.into_bytes()),
        Some(directory) => {
            let path = std::path::absolute(directory)
                .map_err(|error| Error::io("finding the socket directory", error))?;
            BrokerAddress::Path(path.join(socket))
        }
    };
    if address.bytes().len() > MAX_ADDRESS_BYTES {
        return Err(Error::io(format!("using the socket address {address}"), Errno::NAMETOOLONG));
    }
    Ok(address)
}

/// The file of a listener's socket; dropping it removes it, unless another listener has taken its place.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    file: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), file: identity(path)? })
    }

    pub(super) fn remove(&self) {
        let Some(_lock) = self.path.parent().and_then(|directory| lock(directory).ok()) else { return };
        if identity(&self.path).is_ok_and(|now| now == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Keeps other listeners from looking at a dead process's socket at the same time, and then removing each other's.
fn lock(directory: &Path) -> io::Result<fs::File> {
    let directory = fs::File::open(directory)?;
    flock(&directory, FlockOperation::LockExclusive)?;
    Ok(directory)
}

/// A socket that is connected to under this name.
pub(super) fn listen(name: &str, address: &BrokerAddress) -> Result<(OwnedFd, Option<SocketFile>)> {
    let failed = |error: io::Error| Error::io(format!("listening at {address}"), error);
    let target = address.to_socket_address()?;
    let directory = match address {
        BrokerAddress::Path(path) => path.parent(),
        BrokerAddress::Abstract(_) => None,
    };
    let _lock = directory.map(lock).transpose().map_err(failed)?;
    let socket = socket::new_socket().map_err(|error| failed(error.into()))?;
    let mut bound = rustix::net::bind(&socket, &target);
    if bound == Err(Errno::ADDRINUSE)
        && let BrokerAddress::Path(path) = address
        && is_left_behind(address)?
    {
        fs::remove_file(path).map_err(failed)?;
        bound = rustix::net::bind(&socket, &target);
    }
    match bound {
        Ok(()) => {}
        Err(Errno::ADDRINUSE) => return Err(in_use(name, address)),
        Err(error) => return Err(failed(error.into())),
    }
    rustix::net::listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
    let file = match address {
        BrokerAddress::Path(path) => Some(SocketFile::of(path).map_err(failed)?),
        BrokerAddress::Abstract(_) => None,
    };
    Ok((socket, file))
}

/// Is this the socket of a process that was killed and could not remove it?
fn is_left_behind(address: &BrokerAddress) -> Result<bool> {
    let socket = socket::new_socket().map_err(|error| Error::io("creating a socket", error))?;
    Ok(rustix::net::connect(&socket, &address.to_socket_address()?) == Err(Errno::CONNREFUSED))
}

/// The kernel tells who listens to whoever connects; nothing is said.
fn in_use(name: &str, address: &BrokerAddress) -> Error {
    let listener = || {
        let socket = socket::new_socket().ok()?;
        rustix::net::connect(&socket, &address.to_socket_address().ok()?).ok()?;
        peer_credentials(&socket).ok()
    };
    let pid = listener().map_or(0, |credentials| credentials.pid);
    let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
    Error::ChannelNameInUse { name: name.to_owned(), pid, program }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_be_a_path_or_cannot_be_written_is_none() {
        for (name, why) in
            [("", "empty"), ("a/b", "letters"), ("ä", "letters"), ("a b", "letters"), ("\0", "letters")]
        {
            let text = address(name, 7, None).unwrap_err().to_string();
            assert!(text.contains(why), "{text}");
        }
        assert!(address(&"x".repeat(65), 7, None).is_err());
        let longest = "x".repeat(64);
        let BrokerAddress::Abstract(bytes) = address(&longest, 7, None).unwrap() else {
            panic!("no directory")
        };
        assert_eq!(bytes, format!("device-ipc.7.{longest}").into_bytes());
        assert!(address("a.b-c_D9", 7, Some(Path::new("/run"))).is_ok());
    }

    #[test]
    fn a_directory_that_is_too_deep_is_refused() {
        let deep = PathBuf::from(format!("/{}", "d".repeat(100)));
        assert!(matches!(address("x", 7, Some(&deep)), Err(Error::Io { .. })));
    }
}
