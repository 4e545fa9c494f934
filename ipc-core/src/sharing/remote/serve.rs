//! The exporter's side: one thread for each connection of an importer.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use device_ipc_tcp::Key;

use super::control::Control;
use super::ring_out::RingLease;
use super::served::{MAX_READY_WAIT, ServedClient, ServedLease, TICK, failed, send, text};
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::os::log::{self, Throttle};
use crate::sharing::Runtime;
use crate::transport::{Admission, ConnectionPermit, MAX_REQUEST_BYTES};
use crate::wire::Failure;
use crate::wire::descriptor::ExportId;
use crate::wire::remote::{METADATA_BATCH_BYTES, RemoteOpen, RemoteRefusal, RemoteReply, RemoteRequest};

/// The time limit of the handshake, and of the first request after it.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The time that a connection without a lease is kept for a further request.
const IDLE: Duration = Duration::from_secs(30);

/// The interval at which an importer whose share is exhausted is tried again.
const SHARE_POLL: Duration = Duration::from_millis(20);

/// The longest time limit of a transfer that an importer may state.
pub(super) const MAX_TRANSFER: Duration = Duration::from_secs(24 * 3600);

/// The lease of a silent importer ends this much later than the time limit of its transfer.
pub(super) const GRACE: Duration = Duration::from_secs(10);

/// Serves a connection until it ends.
pub(super) fn serve(served: &ServedClient, permit: &ConnectionPermit, stream: Arc<TcpStream>) {
    if let Err(why) = try_serve(served, permit, stream) {
        static WARNINGS: Throttle = Throttle::new();
        if let Some(count) = WARNINGS.count() {
            let peer = served.peer;
            tracing::warn!(target: log::EXPORT, %peer, why, count, "the connection of an importer of another host has failed");
        }
    }
}

fn try_serve(served: &ServedClient, permit: &ConnectionPermit, stream: Arc<TcpStream>) -> Result<(), String> {
    // In a forked child there is no such thread.
    let runtime = served.runtime.here().ok_or("the process has no exports")?;
    kill_point!("exporter:remote-accepted");
    let mut export = ExportId(0);
    let key_of = |id: u64| {
        export = ExportId(id);
        let token = runtime.exports.remote_token(export, served.server)?;
        Some(Key::from(token.to_bytes()))
    };
    let mut connection =
        device_ipc_tcp::accept(stream, key_of, clock::to_system(clock::now() + HANDSHAKE)).map_err(text)?;
    connection.limit_received(MAX_REQUEST_BYTES);
    let mut admission = permit.mark_in_use(export.0);
    if admission == Admission::Closed {
        return Err("another connection took its place".into());
    }
    kill_point!("exporter:remote-proved");
    let mut control = Control::new(connection);
    let mut had_request = false;
    // The importer closes the connection, or leaves it idle, when it needs it no longer.
    while let Some(request) = control.receive(if had_request { IDLE } else { HANDSHAKE }).ok().flatten() {
        // The importer connects again if its connection has been closed for another one.
        if had_request {
            admission = permit.mark_in_use(export.0);
        }
        if admission == Admission::Closed {
            return Ok(());
        }
        let request = RemoteRequest::decode(&request)?;
        if let RemoteRequest::Open(open) | RemoteRequest::Join(open) = &request {
            let until = clock::now() + Duration::from_millis(open.wait_ms.into()).min(MAX_READY_WAIT);
            // An importer that goes away makes the connection readable.
            while admission == Admission::Exhausted && clock::now() < until && !control.wait(SHARE_POLL, None)
            {
                admission = permit.mark_in_use(export.0);
            }
        }
        match request {
            RemoteRequest::Open(_) | RemoteRequest::Join(_) if admission == Admission::Closed => {
                return Ok(());
            }
            RemoteRequest::Open(_) | RemoteRequest::Join(_) if admission == Admission::Exhausted => {
                let detail = format!(
                    "the leases on this export, or those of {}, are as many as permitted",
                    served.peer.ip()
                );
                let refusal = RemoteRefusal::Failed(Failure::quota(detail));
                send(&mut control, &RemoteReply::Refused(refusal))?;
                had_request = true;
            }
            RemoteRequest::Open(open) => {
                lease(served, runtime, export, &open, &mut control)?;
                had_request = true;
            }
            // The importer may have sent them before it read a refusal.
            RemoteRequest::Ping => send(&mut control, &RemoteReply::Pong)?,
            RemoteRequest::Release => {}
            RemoteRequest::Join(open) => {
                read_ring(served, runtime, export, &open, &mut control)?;
                had_request = true;
            }
            RemoteRequest::Acknowledge { .. } | RemoteRequest::Leave => {
                return Err("the importer reads no ring".into());
            }
        }
        if had_request {
            permit.mark_idle();
        }
    }
    Ok(())
}

/// Grants a lease and keeps it until the importer releases it, is gone, or is silent for too long; or refuses it.
fn lease(
    served: &ServedClient,
    runtime: &'static Runtime,
    export: ExportId,
    open: &RemoteOpen,
    control: &mut Control,
) -> Result<(), String> {
    match ServedLease::begin(served, runtime, export, open) {
        Ok((lease, metadata)) => {
            send_metadata(metadata, control)?;
            kill_point!("exporter:remote-granted");
            keep(lease, open, control)
        }
        Err(refusal) => send(control, &RemoteReply::Refused(refusal)),
    }
}

/// Grants a lease on a ring and serves its reader; or refuses it.
fn read_ring(
    served: &ServedClient,
    runtime: &'static Runtime,
    export: ExportId,
    open: &RemoteOpen,
    control: &mut Control,
) -> Result<(), String> {
    let joined = ServedLease::begin(served, runtime, export, open).and_then(|(lease, metadata)| {
        let ring = RingLease::join(lease).map_err(failed)?.ok_or(RemoteRefusal::NoRing)?;
        Ok((ring, metadata))
    });
    match joined {
        Ok((ring, metadata)) => {
            send_metadata(metadata, control)?;
            send(control, &RemoteReply::Joined { sequence: ring.start() })?;
            ring.serve(silence_limit(open), control)
        }
        Err(refusal) => send(control, &RemoteReply::Refused(refusal)),
    }
}

fn send_metadata(metadata: Vec<Vec<u8>>, control: &mut Control) -> Result<(), String> {
    send(control, &RemoteReply::Granted { regions: metadata.len() as u32 })?;
    batches(metadata).into_iter().try_for_each(|metadata| send(control, &RemoteReply::Regions { metadata }))
}

/// Returns the time after which the lease of a silent importer ends.
fn silence_limit(open: &RemoteOpen) -> Duration {
    Duration::from_millis(open.limit_ms.into()).min(MAX_TRANSFER) + GRACE
}

/// Waits for the end of the lease.
fn keep(lease: ServedLease, open: &RemoteOpen, control: &mut Control) -> Result<(), String> {
    let limit = silence_limit(open);
    let mut silent = Duration::ZERO;
    while silent < limit {
        let Some(request) = control.receive(TICK).map_err(text)? else {
            silent += TICK;
            continue;
        };
        silent = Duration::ZERO;
        match RemoteRequest::decode(&request)? {
            RemoteRequest::Ping => send(control, &RemoteReply::Pong)?,
            RemoteRequest::Release => {
                kill_point!("exporter:remote-released");
                return Ok(());
            }
            RemoteRequest::Open(_) | RemoteRequest::Join(_) => {
                return Err("the importer requested a second lease".into());
            }
            RemoteRequest::Acknowledge { .. } | RemoteRequest::Leave => {
                return Err("the importer reads no ring".into());
            }
        }
    }
    drop(lease);
    Err(format!("process {} was silent for {} s; its lease has ended", open.pid, limit.as_secs()))
}

/// Divides the metadata of regions into messages.
fn batches(metadata: Vec<Vec<u8>>) -> Vec<Vec<Vec<u8>>> {
    let mut batches: Vec<Vec<Vec<u8>>> = Vec::new();
    let mut bytes = 0;
    for one in metadata {
        bytes += one.len();
        match batches.last_mut() {
            Some(last) if bytes <= METADATA_BATCH_BYTES => last.push(one),
            _ => {
                bytes = one.len();
                batches.push(vec![one]);
            }
        }
    }
    batches
}
