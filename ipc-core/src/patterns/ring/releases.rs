//! How a reader tells the writer what it has released.

use std::sync::{Arc, PoisonError};

use super::reader::Inner;
use super::released::{State, Taken};
use super::writer::{StreamKey, event_on};
use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceIpc, DeviceStream};
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::sharing::Runtime;
use crate::sharing::export::check_backend;
use crate::sharing::timeline::{OwnCounter, RingStart};

/// What a reader has taken and released, and who has told of it.
pub(super) struct Releases {
    pub(super) taken: Taken,
    /// The stream that signalled last.
    last_stream: Option<StreamKey>,
    /// Counts which signals to the writer have arrived: the writer's process can write the words that they go by.
    signalled: Option<Arc<OwnCounter>>,
    /// Counts the releases that came before those of older slots, and the stream that did so last.
    own: Option<Arc<OwnCounter>>,
    last_marked: Option<StreamKey>,
    /// For slots that are dropped.
    own_stream: Option<Box<dyn DeviceStream>>,
    /// The last sequence that was accessed and released ahead of its publication.
    pub(super) last_read_ahead: Option<u64>,
}

impl Releases {
    /// Of a reader that begins with this sequence.
    pub(super) const fn from(start: u64) -> Self {
        Self {
            taken: Taken::from(start),
            last_stream: None,
            signalled: None,
            own: None,
            last_marked: None,
            own_stream: None,
            last_read_ahead: None,
        }
    }
}

impl Inner {
    pub(super) fn release_on(self: &Arc<Self>, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
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

    /// The stream tells the writer; of a slot that is not the oldest, the stream that releases the oldest does.
    fn signal_release(
        &self,
        releases: &mut Releases,
        sequence: u64,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let key = StreamKey::of(stream);
        if sequence != releases.taken.first() {
            let value = self.mark(releases, stream)?;
            releases.taken.set(sequence, State::ReleasedOn(key, value));
            return Ok(());
        }
        let (mut together, mut behind) = (0, None);
        for state in releases.taken.behind_first() {
            if let State::ReleasedOn(on, value) = state
                && *on != key
            {
                behind = behind.max(Some(*value));
            }
            together += 1;
        }
        if let (Some(own), Some(value)) = (&releases.own, behind) {
            own.wait_for_own(value, stream)?;
        }
        let signalled = counter(&mut releases.signalled, &self.backend)?;
        if releases.last_stream != Some(key) {
            signalled.wait_for_all(stream)?;
        }
        let value = sequence + 1 + together as u64;
        match self.timeline.signal(value, &stream) {
            // Nobody waits for it any longer.
            Err(_) if self.timeline.check().is_err() => return Ok(()),
            told => told?,
        }
        signalled.mark(value, stream);
        releases.taken.forget(together);
        releases.last_stream = Some(key);
        Ok(())
    }

    pub(super) fn release_now(&self, sequence: u64) -> Result<()> {
        self.owner.check()?;
        kill_point!("importer:ring-releasing");
        if self.timeline.check().is_ok() {
            let mut releases = self.lock();
            if self.on_host {
                self.tell_released(&mut releases, sequence);
            } else {
                self.signal_release_now(&mut releases, sequence)?;
            }
        }
        kill_point!("importer:ring-released");
        Ok(())
    }

    /// The host tells the writer; of a slot that is not the oldest, whoever releases the oldest does.
    fn signal_release_now(&self, releases: &mut Releases, sequence: u64) -> Result<()> {
        if sequence != releases.taken.first() {
            releases.taken.set(sequence, State::Released);
            return Ok(());
        }
        let has_come = |value| releases.own.as_ref().is_none_or(|own| own.has_come_to(value));
        let arrived = releases.signalled.as_ref().is_none_or(|signalled| signalled.has_arrived());
        let (mut together, mut all_there) = (0, arrived);
        for state in releases.taken.behind_first() {
            all_there &= !matches!(state, State::ReleasedOn(_, value) if !has_come(*value));
            together += 1;
        }
        if !all_there {
            let why = "a stream has yet to get to the release of another one; synchronise that stream, or release this one \
                       on a stream";
            return Err(Error::RingNotYet { sequence, what: "released", why: why.into() });
        }
        match self.timeline.signal_now(sequence + 1 + together as u64) {
            // Nobody waits for it any longer.
            Err(_) if self.timeline.check().is_err() => return Ok(()),
            signalled => signalled?,
        }
        releases.taken.forget(together);
        releases.last_stream = None;
        Ok(())
    }

    /// Counts on when the stream gets here, and streams that did so before have; the count.
    fn mark(&self, releases: &mut Releases, stream: BorrowedStream<'_>) -> Result<u64> {
        let own = counter(&mut releases.own, &self.backend)?;
        let (key, value) = (StreamKey::of(stream), own.last_signalled() + 1);
        own.signal_behind(value, stream, releases.last_marked == Some(key))?;
        releases.last_marked = Some(key);
        Ok(value)
    }

    /// A thread of the library tells the writer, when the stream has got there.
    fn release_by_host(self: &Arc<Self>, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let runtime = Runtime::get()?;
        match event_on(&*self.backend, stream)? {
            None => self.tell_released(&mut self.lock(), sequence),
            Some(event) => {
                self.lock().taken.set(sequence, State::Passing);
                let inner = Arc::clone(self);
                runtime.worker.submit_when(event, move || inner.tell_released(&mut inner.lock(), sequence));
            }
        }
        Ok(())
    }

    fn tell_released(&self, releases: &mut Releases, sequence: u64) {
        releases.taken.set(sequence, State::Released);
        let first = releases.taken.forget_released();
        if first > self.timeline.last_signalled() {
            // Whoever has gone waits for nothing.
            let _ = self.timeline.signal_now(first);
        }
    }

    /// Notes that work may have read a sequence which had not been published when its slot was released or dropped.
    pub(super) fn note_read_ahead(&self, sequence: u64) {
        let mut releases = self.lock();
        releases.last_read_ahead = releases.last_read_ahead.max(Some(sequence));
    }

    /// A slot was dropped without a release: when its bytes have come and the device has been waited for, it counts as released.
    pub(super) fn let_go(self: &Arc<Self>, sequence: u64) {
        let Some(runtime) = Runtime::of_guard(&self.owner) else { return };
        self.lock().taken.set(sequence, State::Dropped);
        let (asks, inner) = (Arc::clone(self), Arc::clone(self));
        let has_come = move || Ok(asks.is_published(sequence).unwrap_or(true));
        runtime.worker.submit_once(has_come, move || inner.release_dropped(sequence));
    }

    fn release_dropped(&self, sequence: u64) {
        if let Err(error) = self.backend.synchronize_device(self.slots.device()) {
            tracing::warn!(%error, "the device could not be waited for before a slot of a ring was released");
        }
        let mut releases = self.lock();
        let told = if self.timeline.check().is_err() {
            releases.taken.set(sequence, State::Held);
            Ok(())
        } else if self.on_host {
            self.tell_released(&mut releases, sequence);
            Ok(())
        } else if sequence != releases.taken.first() {
            releases.taken.set(sequence, State::Released);
            Ok(())
        } else {
            self.release_on_own_stream(&mut releases, sequence)
        };
        if let Err(error) = told {
            tracing::warn!(%error, sequence, "a slot of a ring that was dropped cannot be released");
            releases.taken.set(sequence, State::Held);
        }
        drop(releases);
        self.released.notify_all();
    }

    fn release_on_own_stream(&self, releases: &mut Releases, sequence: u64) -> Result<()> {
        let stream = match releases.own_stream.take() {
            Some(stream) => stream,
            None => self.backend.memory().create_stream(self.slots.device())?,
        };
        let told = self.signal_release(releases, sequence, stream.as_borrowed());
        releases.own_stream = Some(stream);
        told
    }
}

/// The counter, which is made when it is first needed.
fn counter<'a>(
    counter: &'a mut Option<Arc<OwnCounter>>,
    backend: &Arc<dyn DeviceIpc>,
) -> Result<&'a Arc<OwnCounter>> {
    if counter.is_none() {
        *counter = Some(OwnCounter::new(backend)?);
    }
    Ok(counter.as_ref().expect("it was just made"))
}

impl Drop for Inner {
    /// The work that reads slots has been done when the releases behind it have arrived; then the memory is closed without
    /// waiting for the device, whose other streams may wait for what this very ring has yet to bring.
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        kill_point!("importer:ring-left");
        let releases = self.releases.get_mut().unwrap_or_else(PoisonError::into_inner);
        let all_released = releases.taken.is_empty() && self.timeline.start() != RingStart::Dismissed;
        let runtime = Runtime::of_guard(&self.owner);
        let (Some(runtime), true) = (runtime, all_released && self.timeline.check().is_ok()) else {
            // A plain drop waits for the device.
            return drop(mapping);
        };
        let timeline = self.timeline.clone();
        let (arrives, signalled) = (timeline.clone(), releases.signalled.take());
        let arrived = move || signalled.as_ref().is_none_or(|signalled| signalled.has_arrived());
        runtime.worker.submit_once(
            move || Ok(arrived() || arrives.check().is_err()),
            move || if timeline.check().is_ok() { mapping.end_finished() } else { drop(mapping) },
        );
    }
}
