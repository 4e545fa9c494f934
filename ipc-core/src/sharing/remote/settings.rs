//! The transfer engine of copies between hosts, and the address at which others request them.

use std::net::SocketAddr;
use std::sync::Arc;

use super::{serve, served};
use crate::backend::engine::TransferEngine;
use crate::model::error::{Error, Result};
use crate::sharing::Runtime;
use crate::sharing::export::RemoteMemory;
use crate::transport::TcpServer;
use crate::wire::descriptor::is_reachable;

/// The settings of copies between hosts, for [`IpcBuilder::remote`](crate::IpcBuilder::remote).
///
/// With an engine, an [`Ipc`](crate::Ipc) can copy memory of other hosts ([`OpenBuilder::copy`](crate::OpenBuilder::copy)).
/// If it also [listens](Self::listen), importers of other hosts can copy its exports.
///
/// # Trusted networks only
///
/// The connection to the exporter is authenticated by the descriptor's token, which is not sent, and its messages are protected
/// against modification; they are not encrypted. **The transfer engine is not protected.** UCX, which NIXL uses, listens on a TCP port of
/// every network interface as soon as the engine is created, without authentication, and reads and writes the addresses that a peer states: every
/// process that can reach the port can read and write the memory of this process. Over TCP and with software RMA nothing
/// prevents a read of memory that is not shared, or not shared any longer. Use a network on which every process is trusted, and limit the engine to it
/// (for UCX by `UCX_NET_DEVICES`).
#[derive(Clone, Debug)]
pub struct Remote {
    pub(super) engine: Arc<dyn TransferEngine>,
    server: Option<Arc<TcpServer>>,
}

impl Remote {
    /// Creates settings with which an [`Ipc`](crate::Ipc) copies memory of other hosts.
    pub fn new(engine: Arc<dyn TransferEngine>) -> Self {
        Self { engine, server: None }
    }

    /// Listens at an address of a network interface, so that importers of other hosts can copy the exports of each
    /// [`Ipc`](crate::Ipc) with these settings. Port 0 takes a free port. On [trusted networks](Self#trusted-networks-only) only.
    ///
    /// Descriptors of these exports contain the address. The port is open as long as these settings or such an export exist.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use device_ipc_core::{Ipc, Remote, Result, backend::engine::TransferEngine};
    /// # fn listen(engine: Arc<dyn TransferEngine>) -> Result<Ipc> {
    /// let remote = Remote::new(engine).listen("10.0.0.1:0")?;
    /// Ipc::builder().remote(remote).auto()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Io`] for an address that is not one of this host, is not that of one interface, or is in use;
    /// [`Error::Forked`].
    pub fn listen(self, address: &str) -> Result<Self> {
        let address = parse(address)?;
        let runtime = Runtime::get()?.for_guard();
        let engine = self.engine.info().name;
        let server = TcpServer::start(address, move |server, permit, stream, peer| {
            serve::serve(&served::ServedClient { runtime, server, engine, peer }, &permit, stream);
        })?;
        Ok(Self { server: Some(Arc::new(server)), ..self })
    }

    /// Returns the address at which exports can be copied.
    pub fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(|server| server.address())
    }

    /// Returns the registration of a new export.
    pub(crate) fn memory(&self) -> Option<RemoteMemory> {
        let server = self.server.as_ref()?;
        Some(RemoteMemory::new(Arc::clone(&self.engine), Arc::clone(server)))
    }

    pub(crate) fn engine(&self) -> &dyn TransferEngine {
        &*self.engine
    }
}

/// Reads `IP` or `IP:PORT`.
fn parse(text: &str) -> Result<SocketAddr> {
    let address = text.parse().ok().or_else(|| Some(SocketAddr::new(text.parse().ok()?, 0)));
    let invalid = |why: &str| {
        let cause = std::io::Error::new(std::io::ErrorKind::InvalidInput, why.to_owned());
        Error::io(format!("listening at {text:?}"), cause)
    };
    let address: SocketAddr = address
        .ok_or_else(|| invalid("expected an IP address, with or without a port, such as 10.0.0.1:0"))?;
    // The port is not known yet.
    if is_reachable(SocketAddr::new(address.ip(), 1)) {
        return Ok(address);
    }
    Err(invalid(
        "state the address of one network interface, since importers connect to the address that the descriptor names",
    ))
}
