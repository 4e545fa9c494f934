//! Replies that carry file descriptors: opened exports with the vendor's handles, and counter pages.

use std::os::fd::{AsFd, BorrowedFd};

use super::session::{BrokerSession, WaitingAnswer};
use crate::backend::HandleBytes;
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::sharing::export::Granted;
use crate::sharing::timeline::Timeline;
use crate::transport::socket::MAX_FDS;
use crate::transport::{Connection, Next};
use crate::wire::protocol::{PageId, Reply, RequestId, WireHandle};
use crate::wire::{OpenedExport, Refusal};

/// Maximum number of handles in one packet, so that it stays far below the maximum size.
const HANDLES_OF_A_PACKET: usize = 512;

impl BrokerSession<'_> {
    /// Sends a counter slot for a lease. If the importer waits for the bytes by its ready word, the driver is called first.
    pub(super) fn timeline(
        &mut self,
        request: RequestId,
        lease: LeaseId,
        ready: bool,
        connection: &mut Connection,
    ) -> Next {
        let Some(export) = self.leases.get(&lease) else {
            return connection.violated("it asked for the words of a lease that it does not hold");
        };
        let (slots, peer) = (&mut self.slots, *connection.peer());
        let begun = self.exports.timeline(*export, lease, !ready, || slots.take_for(&peer));
        let (timeline, shared) = match begun {
            Ok(Some(begun)) => begun,
            Ok(None) => return connection.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
            Err(error) => {
                return connection.send(&Reply::Refused { request, refusal: error.into() }, &[]);
            }
        };
        self.slots.note(lease, timeline.endpoint());
        if !ready || shared.ready.is_none() {
            return self.send_timeline(request, lease, &timeline, connection);
        }
        let waiting = WaitingAnswer::Timeline(request, lease, timeline.clone());
        self.ask_the_driver(waiting, move || {
            let Some(ready) = &shared.ready else { return Ok(()) };
            Ok(timeline.signal_ready(&*ready.event)?)
        })
    }

    /// The page is sent each time: an importer whose request timed out may have missed it.
    pub(super) fn send_timeline(
        &mut self,
        request: RequestId,
        lease: LeaseId,
        timeline: &Timeline,
        connection: &mut Connection,
    ) -> Next {
        let place = timeline.endpoint().place();
        let (slot, base) = (place.slot, place.base);
        let next = match self.slots.page_of(lease) {
            Some((number, file)) => connection
                .send(&Reply::Timeline { request, page: PageId(number), slot, base }, &[file.as_fd()]),
            // The lease was released meanwhile.
            None => connection.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
        };
        kill_point!("exporter:gave-timeline");
        next
    }

    /// Sends the handles in as many packets as their descriptors need; the last packet contains the lease.
    pub(super) fn send_opened(
        &mut self,
        request: RequestId,
        granted: &Granted,
        device: usize,
        connection: &mut Connection,
    ) -> Next {
        let allocations = &granted.shared.allocations;
        let exported: Option<Vec<_>> =
            allocations.iter().map(|allocation| allocation.handle(device)).collect();
        let Some(exported) = exported else {
            return connection.violated("a handle was to be sent that has not been made");
        };
        // Another copy of the library in this process: drivers do not open handles of the same process.
        let is_own_process = connection.peer().pid == self.identity.pid;
        let mut fds = Vec::new();
        let mut packet = Vec::with_capacity(exported.len().min(HANDLES_OF_A_PACKET));
        for (allocation, exported) in allocations.iter().zip(&exported) {
            let sent_fds = if is_own_process { &[] } else { exported.fds.as_slice() };
            if fds.len() + sent_fds.len() > MAX_FDS || packet.len() >= HANDLES_OF_A_PACKET {
                let handles = std::mem::take(&mut packet);
                let next = connection.send(&Reply::Handles { request, handles }, &fds);
                if next != Next::Keep {
                    return next;
                }
                fds.clear();
            }
            fds.extend(sent_fds.iter().map(AsFd::as_fd));
            let (kind, bytes) = if is_own_process {
                let address = exported.extent.allocation.ptr.get().to_le_bytes();
                (WireHandle::OWN_ADDRESS, HandleBytes::new(address))
            } else {
                (exported.kind, exported.bytes.clone())
            };
            packet.push(WireHandle {
                allocation: allocation.id(),
                kind,
                bytes,
                fds: sent_fds.len() as u16,
                size: exported.extent.allocation.len,
                generation: exported.extent.generation,
            });
        }
        self.send_last(request, granted, packet, false, &fds, connection)
    }

    /// Returns whether the importer holds a lease on the same allocations, so that it has their handles already.
    pub(super) fn has_it_open(&self, like: Option<LeaseId>, granted: &Granted) -> bool {
        let held = like.and_then(|lease| Some((*self.leases.get(&lease)?, lease)));
        let copied = like.is_some_and(|lease| self.stagings.contains_key(&lease));
        let same = |(export, lease)| self.exports.has_allocations_of(export, lease, &granted.shared);
        granted.borrowed.is_none() && !copied && held.is_some_and(same)
    }

    /// Sends the lease, with the last of the handles.
    pub(super) fn send_last(
        &mut self,
        request: RequestId,
        granted: &Granted,
        handles: Vec<WireHandle>,
        like: bool,
        fds: &[BorrowedFd<'_>],
        connection: &mut Connection,
    ) -> Next {
        let ready = granted.shared.ready.as_ref().map(|ready| ready.handle.clone());
        let (lease, keep, confirm) = (granted.lease, granted.keep, granted.borrowed.is_some());
        let slot = granted.slot;
        // Sent before.
        let ahead = Vec::new();
        let opened = OpenedExport { request, lease, handles, ready, keep, confirm, like, slot, ahead };
        let next = connection.send(&Reply::Opened(opened), fds);
        kill_point!("exporter:granted");
        next
    }
}
