//! The lease of an importer of another host, in the exporter, and the replies to the importer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::control::Control;
use crate::model::error::{Error, ErrorKind};
use crate::model::lease::LeaseId;
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::os::log;
use crate::sharing::export::{BorrowedMemory, LocalGrant, OpenRequest, Shared};
use crate::sharing::timeline::Termination;
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::ServerId;
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::encode;
use crate::wire::remote::{RemoteOpen, RemoteRefusal, RemoteReply};
use crate::wire::{Failure, Refusal};

/// The time limit for sending one message.
const SEND: Duration = Duration::from_secs(10);

/// The longest wait for the streams that write the bytes.
pub(super) const MAX_READY_WAIT: Duration = Duration::from_secs(600);

/// The interval at which silence is counted. Counting intervals instead of time, the silence does not include the time for which this
/// process itself was suspended, after which the importer's messages are still to be read.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// The server and the client of a connection.
#[derive(Debug)]
pub(super) struct ServedClient {
    pub(super) runtime: RuntimeRef,
    pub(super) server: ServerId,
    pub(super) engine: &'static str,
    pub(super) peer: SocketAddr,
}

/// A lease of an importer of another host. Dropping it ends it.
pub(super) struct ServedLease {
    pub(super) runtime: &'static Runtime,
    pub(super) export: ExportId,
    pub(super) lease: LeaseId,
    /// Dropped before the lease ends, as the worker waits for the last reference.
    shared: Option<Arc<Shared>>,
}

impl ServedLease {
    /// Begins a lease, waits until the bytes are ready, and registers the memory. Returns the metadata of its regions.
    pub(super) fn begin(
        served: &ServedClient,
        runtime: &'static Runtime,
        export: ExportId,
        open: &RemoteOpen,
    ) -> Result<(Self, Vec<Vec<u8>>), RemoteRefusal> {
        if open.engine != served.engine {
            return Err(RemoteRefusal::OtherEngine { engine: served.engine.to_owned() });
        }
        let token = runtime.exports.remote_token(export, served.server).ok_or(RemoteRefusal::Dropped)?;
        let access = crate::backend::Access::ReadOnly;
        let request = OpenRequest { export, token, grant: None, access };
        let program = format!("{} on {}", open.program, served.peer.ip());
        let granted = runtime.exports.grant_remotely(request, open.pid, program.into());
        // The token is right and the access is the least, so the export must have been dropped.
        let LocalGrant { lease, borrowed, shared } = granted.map_err(|refusal| match refusal {
            Refusal::Failed(failure) => RemoteRefusal::Failed(failure),
            _ => RemoteRefusal::Dropped,
        })?;
        let lease = Self { runtime, export, lease, shared: Some(shared) };
        kill_point!("exporter:remote-leased");
        let shared = lease.shared.as_ref().expect("taken by drop alone");
        if let Some(Err(detail)) = borrowed.as_ref().map(BorrowedMemory::check) {
            return Err(RemoteRefusal::Stale { detail });
        }
        if let Some(ready) = &shared.ready {
            let wait = Duration::from_millis(open.wait_ms.into()).min(MAX_READY_WAIT);
            ready.event.synchronize(wait).map_err(not_ready)?;
        }
        let metadata = shared.register().map_err(failed)?;
        tracing::debug!(target: log::EXPORT, %export, peer = %served.peer, pid = open.pid, "an importer of another host pulls");
        Ok((lease, metadata))
    }
}

pub(super) fn failed(error: Error) -> RemoteRefusal {
    RemoteRefusal::Failed(Failure::from(&error))
}

fn not_ready(error: Error) -> RemoteRefusal {
    if error.kind() == ErrorKind::Timeout { RemoteRefusal::NotReady } else { failed(error) }
}

impl Drop for ServedLease {
    fn drop(&mut self) {
        self.shared = None;
        self.runtime.exports.release(self.export, self.lease, Termination::Released);
    }
}

pub(super) fn text(error: impl ToString) -> String {
    error.to_string()
}

pub(super) fn send(control: &mut Control, reply: &RemoteReply) -> Result<(), String> {
    control.send(&encode(reply).map_err(text)?, clock::now() + SEND).map_err(text)
}
