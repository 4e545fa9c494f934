//! Signals of releases from a reader to the writer.

use std::sync::{Arc, PoisonError};

use super::reader_state::{ReaderState, Releases};
use super::released::SlotState;
use super::writer::{StreamKey, record_event_on};
use crate::backend::DeviceIpc;
use crate::backend::stream::BorrowedStream;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::sharing::export::check_backend;
use crate::sharing::timeline::{OwnCounter, RingStart};

impl ReaderState {
    pub(super) fn release_on(self: &Arc<Self>, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.runtime.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)?;
        kill_point!("importer:ring-releasing");
        if self.timeline.check().is_ok() {
            if self.on_host {
                self.release_by_host(sequence, stream)?;
            } else {
                self.signal_release(&mut self.lock(), sequence, stream)?;
            }
        }
        kill_point!("importer:ring-released");
        Ok(())
    }

    /// Signals a release by a stream. If the slot is not the oldest, the stream that releases the oldest slot signals it.
    fn signal_release(
        &self,
        releases: &mut Releases,
        sequence: u64,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let key = StreamKey::of(stream);
        if sequence != releases.taken.first() {
            let value = self.mark(releases, stream)?;
            releases.taken.set(sequence, SlotState::ReleasedOn(key, value));
            return Ok(());
        }
        let (mut more, mut last_value) = (0, None);
        for state in releases.taken.released_after_first() {
            if let SlotState::ReleasedOn(on, value) = state
                && *on != key
            {
                last_value = last_value.max(Some(*value));
            }
            more += 1;
        }
        if let (Some(own), Some(value)) = (&releases.own, last_value) {
            own.wait_for_own(value, stream)?;
        }
        let signalled = counter(&mut releases.signalled, &self.backend)?;
        if releases.last_stream != Some(key) {
            signalled.wait_for_all(stream)?;
        }
        let value = sequence + 1 + more as u64;
        match self.timeline.signal(value, &stream) {
            // The writer has terminated and waits no longer.
            Err(_) if self.timeline.check().is_err() => return Ok(()),
            result => result?,
        }
        signalled.mark(value, stream);
        releases.taken.remove_signalled(more);
        releases.last_stream = Some(key);
        Ok(())
    }

    pub(super) fn release_now(&self, sequence: u64) -> Result<()> {
        self.runtime.check()?;
        kill_point!("importer:ring-releasing");
        if self.timeline.check().is_ok() {
            let mut releases = self.lock();
            if self.on_host {
                self.signal_from_host(&mut releases, sequence);
            } else {
                self.signal_release_now(&mut releases, sequence)?;
            }
        }
        kill_point!("importer:ring-released");
        Ok(())
    }

    /// Signals a release from the host. If the slot is not the oldest, the release of the oldest slot signals it.
    fn signal_release_now(&self, releases: &mut Releases, sequence: u64) -> Result<()> {
        if sequence != releases.taken.first() {
            releases.taken.set(sequence, SlotState::Released);
            return Ok(());
        }
        let has_reached = |value| releases.own.as_ref().is_none_or(|own| own.has_come_to(value));
        let arrived = releases.signalled.as_ref().is_none_or(|signalled| signalled.has_arrived());
        let (mut more, mut all_arrived) = (0, arrived);
        for state in releases.taken.released_after_first() {
            all_arrived &= !matches!(state, SlotState::ReleasedOn(_, value) if !has_reached(*value));
            more += 1;
        }
        if !all_arrived {
            let why = "a stream has not reached the release of another slot; synchronise that stream, or release this slot on a \
                       stream";
            return Err(Error::RingNotYet { sequence, what: "released", why: why.into() });
        }
        match self.timeline.signal_now(sequence + 1 + more as u64) {
            // The writer has terminated and waits no longer.
            Err(_) if self.timeline.check().is_err() => return Ok(()),
            result => result?,
        }
        releases.taken.remove_signalled(more);
        releases.last_stream = None;
        Ok(())
    }

    /// Increments the reader's own counter when the stream reaches this point, after earlier increments. Returns the new value.
    fn mark(&self, releases: &mut Releases, stream: BorrowedStream<'_>) -> Result<u64> {
        let own = counter(&mut releases.own, &self.backend)?;
        let (key, value) = (StreamKey::of(stream), own.last_signalled() + 1);
        own.signal_behind(value, stream, releases.last_marked == Some(key))?;
        releases.last_marked = Some(key);
        Ok(value)
    }

    /// Signals a release from a thread of the library when the stream reaches it.
    fn release_by_host(self: &Arc<Self>, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let runtime = self.runtime.check()?;
        match record_event_on(&*self.backend, stream)? {
            None => self.signal_from_host(&mut self.lock(), sequence),
            Some(event) => {
                self.lock().taken.set(sequence, SlotState::Pending);
                let inner = Arc::clone(self);
                runtime
                    .worker
                    .submit_when(event, move || inner.signal_from_host(&mut inner.lock(), sequence));
            }
        }
        Ok(())
    }

    fn signal_from_host(&self, releases: &mut Releases, sequence: u64) {
        releases.taken.set(sequence, SlotState::Released);
        let first = releases.taken.remove_released();
        if first > self.timeline.last_signalled() {
            // The signal fails if the writer has terminated, and is not needed then.
            let _ = self.timeline.signal_now(first);
        }
    }

    /// Records that work may have read a sequence that was unpublished when its slot was released or dropped.
    pub(super) fn note_read_ahead(&self, sequence: u64) {
        let mut releases = self.lock();
        releases.last_read_ahead = releases.last_read_ahead.max(Some(sequence));
    }

    /// Releases a slot that was dropped, when it has been published and the device is idle.
    pub(super) fn release_after_drop(self: &Arc<Self>, sequence: u64) {
        let Some(runtime) = self.runtime.here() else { return };
        self.lock().taken.set(sequence, SlotState::Dropped);
        let (polled, inner) = (Arc::clone(self), Arc::clone(self));
        let is_published = move || Ok(polled.is_published(sequence).unwrap_or(true));
        runtime.worker.submit_once(is_published, move || inner.release_dropped(sequence));
    }

    fn release_dropped(&self, sequence: u64) {
        if let Err(error) = self.backend.synchronize_device(self.slots.device()) {
            tracing::warn!(target: crate::os::log::RING, %error, "cannot synchronise the device before releasing a dropped ring slot");
        }
        let mut releases = self.lock();
        let released = if self.timeline.check().is_err() {
            releases.taken.set(sequence, SlotState::Held);
            Ok(())
        } else if self.on_host {
            self.signal_from_host(&mut releases, sequence);
            Ok(())
        } else if sequence != releases.taken.first() {
            releases.taken.set(sequence, SlotState::Released);
            Ok(())
        } else {
            self.release_on_own_stream(&mut releases, sequence)
        };
        if let Err(error) = released {
            tracing::warn!(target: crate::os::log::RING, %error, sequence, "cannot release a dropped ring slot");
            releases.taken.set(sequence, SlotState::Held);
        }
        drop(releases);
        self.released.notify_all();
    }

    fn release_on_own_stream(&self, releases: &mut Releases, sequence: u64) -> Result<()> {
        let stream = match releases.own_stream.take() {
            Some(stream) => stream,
            None => self.backend.memory().create_stream(self.slots.device())?,
        };
        let result = self.signal_release(releases, sequence, stream.as_borrowed());
        releases.own_stream = Some(stream);
        result
    }
}

/// Returns a counter, which is created on first use.
fn counter<'a>(
    counter: &'a mut Option<Arc<OwnCounter>>,
    backend: &Arc<dyn DeviceIpc>,
) -> Result<&'a Arc<OwnCounter>> {
    if counter.is_none() {
        *counter = Some(OwnCounter::new(backend)?);
    }
    Ok(counter.as_ref().expect("the counter was just created"))
}

impl Drop for ReaderState {
    /// Closes the memory when the releases have arrived, which proves that the work that reads slots has finished.
    ///
    /// This does not wait for the whole device, because its other streams may wait for later publications of this ring.
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        kill_point!("importer:ring-left");
        let releases = self.releases.get_mut().unwrap_or_else(PoisonError::into_inner);
        let all_released = releases.taken.is_empty() && self.timeline.start() != RingStart::Dismissed;
        let runtime = self.runtime.here();
        let (Some(runtime), true) = (runtime, all_released && self.timeline.check().is_ok()) else {
            // A plain drop waits for the device.
            return drop(mapping);
        };
        let timeline = self.timeline.clone();
        let (polled, signalled) = (timeline.clone(), releases.signalled.take());
        let arrived = move || signalled.as_ref().is_none_or(|signalled| signalled.has_arrived());
        runtime.worker.submit_once(
            move || Ok(arrived() || polled.check().is_err()),
            move || if timeline.check().is_ok() { mapping.end_finished() } else { drop(mapping) },
        );
    }
}
