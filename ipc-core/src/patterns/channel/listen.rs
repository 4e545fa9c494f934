//! The listening end.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Channel;
use super::builder::{ChannelBuilder, LocalEnd};
use super::local::LocalListening;
use super::tcp::TcpListening;
use crate::model::error::{Error, Result};
use crate::sharing::Ipc;
use crate::transport::{Deadline, check_may_wait};

/// A builder for [`Listener`]s; see [`Ipc::listen`](crate::Ipc::listen).
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=2")?);
/// use device_ipc_core::DeviceMap;
///
/// // Memory on device 0 of this process is opened on device 1 of the peer.
/// let map = DeviceMap::new().insert(0, 1)?;
/// let listener = ipc.listen("example-builder").device_map(map).message_limit(1 << 20).start()?;
/// assert_eq!(listener.name(), "example-builder");
/// # Ok(())
/// # }
/// ```
pub type ListenBuilder<'a> = ChannelBuilder<'a, Listen>;

/// The options of a listening end.
#[derive(Debug)]
pub struct Listen(());

impl<'a> ListenBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Ipc, name: &'a str) -> Self {
        Self::of(ipc, name, Listen(()))
    }

    /// Starts to listen.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]; [`Error::ChannelNameInUse`], which names the process that listens;
    /// [`Error::InvalidDeviceMap`] for a map from a device that this process does not see; [`Error::Forked`]. Of
    /// [`Ipc::listen_tcp`](crate::Ipc::listen_tcp) also [`Error::Io`] for an address that is not one of this host, or is in use.
    pub fn start(self) -> Result<Listener> {
        self.begin(None)
    }

    /// Takes over the name from the process at the other end of a channel, which hands it over by [`Listener::hand_over`].
    ///
    /// The name is never free, so that no other process can take it. Waits until the listening socket has arrived, for at most
    /// the timeout of the [`Ipc`](crate::Ipc). Connections that the former listener has not accepted are closed; their
    /// [`ConnectBuilder::start`](crate::ConnectBuilder::start) connects again.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::ChannelClosed`], [`Error::PeerGone`]; [`Error::Io`] if the socket is that of another name or
    /// directory; [`Error::Protocol`] if the process sends a message instead; [`Error::InvalidInput`]; [`Error::Forked`].
    pub fn take_over(self, channel: &Channel) -> Result<Listener> {
        check_may_wait("taking a listener over", self.ipc.timeout())?;
        self.begin(Some(channel))
    }

    fn begin(self, former: Option<&Channel>) -> Result<Listener> {
        let own = self.local_end()?;
        let origin = match self.key {
            None => Origin::Local(LocalListening::start(&own, self.name, former)?),
            Some(key) => Origin::Network(TcpListening::start(self.name, key.clone())?),
        };
        Ok(Listener { name: self.name.to_owned(), own, origin })
    }
}

/// A listener that accepts [`Channel`]s from other processes of this machine under a name, or of other hosts at an address.
///
/// Dropping it frees the name or the address; accepted channels stay open.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// use std::time::Duration;
///
/// let listener = ipc.listen("example-listener").start()?;
/// # let peer = ipc.clone();
/// # let connecting = std::thread::spawn(move || peer.connect("example-listener").start());
/// let channel = listener.accept(Duration::from_secs(10))?;
/// println!("process {} ({}) has connected", channel.peer().pid, channel.program());
/// # drop(connecting.join());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Listener {
    name: String,
    own: LocalEnd,
    origin: Origin,
}

/// The socket that processes connect to.
#[derive(Debug)]
enum Origin {
    /// Of this machine.
    Local(LocalListening),
    /// Of other hosts.
    Network(TcpListening),
}

impl Listener {
    /// Returns the name, or the address that was passed to [`Ipc::listen_tcp`](crate::Ipc::listen_tcp).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the socket address, for messages to users; of a listener for other hosts, the address with its port, to which
    /// they connect.
    pub fn address(&self) -> String {
        match &self.origin {
            Origin::Local(listening) => listening.address().to_string(),
            Origin::Network(listening) => listening.address().to_string(),
        }
    }

    /// Accepts the next process that connects.
    ///
    /// A process that connects without sending hello does not delay others, and is disconnected after 5 s. A process of a
    /// user who is not [allowed](crate::IpcBuilder::allow) is refused.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::OnWorkerThread`] in a callback; [`Error::Io`], for example if this process has no file
    /// descriptors left, after which a later call may succeed. A process with another protocol version, an invalid hello, another
    /// backend or a device map that does not match is refused and logged, and receives the reason: it is no error of this call.
    pub fn accept(&self, timeout: Duration) -> Result<Channel> {
        self.own.runtime.check()?;
        check_may_wait("accepting a channel", timeout)?;
        let deadline = Deadline::after(timeout);
        let accepted = match &self.origin {
            Origin::Local(listening) => listening.accept(&self.own, deadline)?,
            Origin::Network(listening) => listening.accept(&self.own, deadline)?,
        };
        accepted.ok_or_else(|| {
            let detail = format!("; no process has connected to {:?} at {}", self.name, self.address());
            deadline.passed("the accepting of a channel", &detail)
        })
    }

    /// Accepts the next process if one has connected and sent hello, and else returns `None`.
    ///
    /// The listener's descriptor ([`AsFd`]) is readable while there is something to accept or to refuse; call this method until
    /// it returns `None`. While another thread waits in [`accept`](Self::accept), that thread accepts.
    ///
    /// # Errors
    ///
    /// As [`accept`](Self::accept), except for the timeout.
    pub fn try_accept(&self) -> Result<Option<Channel>> {
        self.own.runtime.check()?;
        match &self.origin {
            Origin::Local(listening) => listening.try_accept(&self.own),
            Origin::Network(listening) => listening.try_accept(&self.own),
        }
    }

    /// Returns the time after which [`try_accept`](Self::try_accept) removes a connection whose process has not sent hello.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        match &self.origin {
            Origin::Local(listening) => listening.next_expiry(),
            Origin::Network(_) => None,
        }
    }

    /// Hands the name over to the process at the other end of a channel, which takes it by [`ListenBuilder::take_over`].
    ///
    /// Both processes have the listening socket then: this one accepts no further channel, and drops the listener when the other
    /// process has confirmed, or [takes the name back](Self::take_back). The name is never free meanwhile, and dropping the
    /// listener does not free it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the socket cannot be sent, or the listener or the channel is one of another host;
    /// [`Error::ChannelClosed`], [`Error::PeerGone`]; [`Error::Forked`].
    pub fn hand_over(&self, channel: &Channel) -> Result<()> {
        self.own.runtime.check()?;
        match &self.origin {
            Origin::Local(listening) => listening.hand_over(channel),
            Origin::Network(_) => Err(Error::io("handing a TCP listener over", Errno::OPNOTSUPP)),
        }
    }

    /// Accepts channels again because the process that the name was handed over to has not taken it, or has terminated.
    ///
    /// # Errors
    ///
    /// [`Error::ChannelNameInUse`] if the other process has removed the socket's file and a third one listens there; a later call
    /// tries again. [`Error::Io`]; [`Error::Forked`].
    pub fn take_back(&mut self) -> Result<()> {
        self.own.runtime.check()?;
        match &mut self.origin {
            Origin::Local(listening) => listening.take_back(&self.name),
            Origin::Network(_) => Ok(()),
        }
    }
}

impl AsFd for Listener {
    /// Returns a descriptor that is readable while [`try_accept`](Self::try_accept) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.origin {
            Origin::Local(listening) => listening.as_fd(),
            Origin::Network(listening) => listening.as_fd(),
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Origin::Local(listening) = &self.origin
            && self.own.runtime.is_here()
        {
            listening.remove_file();
        }
    }
}
