//! The exporter's side of a ring that an importer of another host reads: the connection's thread reads the ring in the importer's
//! place, and holds each slot until the importer has pulled it.

use std::time::Duration;

use super::control::Control;
use super::served::{ServedLease, TICK, send, text};
use crate::model::error::Result;
use crate::os::clock;
use crate::sharing::timeline::{Publication, RingStart, Timeline};
use crate::wire::remote::{RemoteReply, RemoteRequest, RingEnd};

/// Maximum number of sequences that have been announced and not acknowledged, so that the messages of a reader that is suspended
/// fit into the buffers of the system.
const MAX_ANNOUNCED: u64 = 64;

/// Bounds of the interval between two looks at the ring: in the first second this part of the time without an event, so that a
/// publication is announced late by a small part of the time since the one before.
const LOOKS: u32 = 64;
const MIN_LOOK: Duration = Duration::from_micros(20);
const MAX_LOOK: Duration = Duration::from_millis(1);

/// Maximum interval later: a thousandth of that time, so that an idle ring costs little.
const MAX_IDLE_LOOK: Duration = Duration::from_millis(10);

/// A reader of a ring of this process, in place of an importer.
pub(super) struct RingLease {
    lease: ServedLease,
    timeline: Timeline,
    /// The first sequence that has not been announced, and the first one that has not been released.
    next: u64,
    released: u64,
    /// Whether there are no further announcements.
    has_ended: bool,
    has_left: bool,
}

impl RingLease {
    /// Joins the ring of a lease; `None` if the export is no ring.
    pub(super) fn join(lease: ServedLease) -> Result<Option<Self>> {
        let timeline = lease.runtime.exports.timeline_within(lease.export, lease.lease)?;
        let start = timeline.start();
        let mut ring = Self { lease, timeline, next: 0, released: 0, has_ended: false, has_left: false };
        let RingStart::At(first) = start else { return Ok(None) };
        (ring.next, ring.released) = (first, first);
        Ok(Some(ring))
    }

    /// Returns the sequence with which the reader begins.
    pub(super) const fn start(&self) -> u64 {
        self.released
    }

    /// Serves the reader until it releases the lease, is gone, or is silent for `limit`.
    pub(super) fn serve(mut self, limit: Duration, control: &mut Control) -> Result<(), String> {
        let (mut silent, mut idle) = (Duration::ZERO, Duration::ZERO);
        while silent < limit {
            if self.announce(control)? {
                idle = Duration::ZERO;
            }
            let look = (idle / LOOKS).clamp(MIN_LOOK, MAX_LOOK).max((idle / 1000).min(MAX_IDLE_LOOK));
            let look = if self.has_ended { TICK } else { look };
            let begun = clock::now();
            let Some(request) = control.receive(look).map_err(text)? else {
                // Almost nothing of the time for which this process was suspended.
                let waited = clock::elapsed(begun).min(look + TICK);
                (silent, idle) = (silent + waited, idle + waited);
                continue;
            };
            silent = Duration::ZERO;
            match RemoteRequest::decode(&request)? {
                RemoteRequest::Ping => send(control, &RemoteReply::Pong)?,
                RemoteRequest::Acknowledge { sequence } => {
                    idle = Duration::ZERO;
                    self.release(sequence, control)?;
                }
                RemoteRequest::Leave => self.leave(),
                RemoteRequest::Release => return Ok(()),
                RemoteRequest::Open(_) | RemoteRequest::Join(_) => {
                    return Err("the importer requested a second lease".into());
                }
            }
        }
        let has_ended = self.has_ended;
        drop(self);
        if !has_ended {
            // It receives this when it continues.
            send(control, &RemoteReply::Ended(RingEnd::Dismissed))?;
        }
        Err(format!("a reader of a ring was silent for {} s; it has been dismissed", limit.as_secs()))
    }

    /// Announces new publications, or the end of the ring. Returns whether there were any.
    fn announce(&mut self, control: &mut Control) -> Result<bool, String> {
        let before = self.next;
        while !self.has_ended && self.next - self.released < MAX_ANNOUNCED {
            match self.timeline.publication(self.next) {
                Publication::Published => {
                    send(control, &RemoteReply::Published { sequence: self.next })?;
                    self.next += 1;
                }
                Publication::Closed => self.end(RingEnd::Closed, control)?,
                Publication::Dismissed | Publication::WriterGone => self.end(RingEnd::Dismissed, control)?,
                Publication::Pending | Publication::Ending => break,
            }
        }
        Ok(self.next > before)
    }

    /// Releases a slot that the importer has pulled, and confirms that the writer had not reused it.
    fn release(&mut self, sequence: u64, control: &mut Control) -> Result<(), String> {
        if self.has_left {
            return Ok(());
        }
        if sequence != self.released || sequence >= self.next {
            return Err(format!("the importer acknowledged sequence {sequence}, not {}", self.released));
        }
        match self.timeline.publication(sequence) {
            Publication::Published => {
                self.released += 1;
                // It fails if the reader has been dismissed since, which the next look reports.
                let _ = self.timeline.signal_now(self.released);
                send(control, &RemoteReply::Confirmed { sequence })
            }
            _ if self.has_ended => Ok(()),
            _ => self.end(RingEnd::Dismissed, control),
        }
    }

    /// Leaves the ring, so that the writer does not wait for this reader. The lease keeps the memory until the engine has finished.
    fn leave(&mut self) {
        self.has_ended = true;
        if !std::mem::replace(&mut self.has_left, true) {
            let ServedLease { runtime, export, lease, .. } = self.lease;
            let far = runtime.exports.known_timeline(export, lease);
            // No work of this process's devices uses the slots.
            runtime.poller.end_once_arrived(self.timeline.clone(), far);
        }
    }

    fn end(&mut self, end: RingEnd, control: &mut Control) -> Result<(), String> {
        self.has_ended = true;
        send(control, &RemoteReply::Ended(end))
    }
}

impl Drop for RingLease {
    /// Ends the counters before the lease.
    fn drop(&mut self) {
        self.leave();
    }
}
