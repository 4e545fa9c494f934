//! The address of a broker.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::net::SocketAddrUnix;

use crate::model::error::{Error, Result};
use crate::model::printable::printable;

/// The environment variable with the directory in which exporters create their sockets, for containers that share a volume but
/// no network namespace.
pub(crate) const SOCKET_DIR_VARIABLE: &str = "DEVICE_IPC_SOCKET_DIR";

/// Maximum length of a socket name in bytes: `sun_path` without the leading or terminating zero (unix(7)).
pub(crate) const MAX_ADDRESS_BYTES: usize = 107;

/// The address of an exporter's broker, which all exports of the process share.
#[derive(Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BrokerAddress {
    /// A name in the abstract namespace, which belongs to the network namespace and to no file system.
    Abstract(Arc<[u8]>),
    /// A socket in the file system.
    Path(Arc<Path>),
}

impl BrokerAddress {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Abstract(name) => name,
            Self::Path(path) => path.as_os_str().as_bytes(),
        }
    }

    pub(crate) fn to_socket_address(&self) -> Result<SocketAddrUnix> {
        let made = match self {
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name),
            Self::Path(path) => SocketAddrUnix::new(&**path),
        };
        made.map_err(|error| Error::io(format!("using the socket address {self}"), error))
    }
}

impl fmt::Display for BrokerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
            // A descriptor names it, and so another process.
            Self::Path(path) => f.write_str(&printable(&path.to_string_lossy())),
        }
    }
}

impl fmt::Debug for BrokerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BrokerAddress({self})")
    }
}
