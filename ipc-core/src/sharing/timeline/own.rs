//! Counters of this process alone.
//!
//! They order streams of this process among each other. A word that a peer maps never does: the peer could set it back, and the
//! streams would wait for ever.

use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::Timeline;
use super::endpoint::{Endpoint, Termination};
use super::page::{Side, TimelineSlot};
use super::slots::Slots;
use crate::backend::DeviceIpc;
use crate::backend::stream::BorrowedStream;
use crate::model::error::Result;
use crate::os::process::Owner;
use crate::sharing::Runtime;
use crate::sharing::host_pages::{any_timeline_is_live, drop_unused_by};
use crate::wire::Returned;

/// The slots of this process alone, by the address of their timeline's state.
static OWN: LazyLock<Mutex<Slots<usize>>> = LazyLock::new(|| {
    drop_unused_by(drop_unused_pages);
    Mutex::new(Slots::new(false))
});

fn lock() -> MutexGuard<'static, Slots<usize>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(endpoint: &Arc<Endpoint>) -> usize {
    Arc::as_ptr(endpoint) as usize
}

/// Takes a slot for a timeline within this process.
pub(crate) fn take_own_slot() -> Result<TimelineSlot> {
    // A forked child has the parent's pages, and perhaps its lock.
    Runtime::get()?;
    lock().take()
}

/// Notes the timeline that uses a slot.
pub(crate) fn note_own_slot(timeline: &Timeline) {
    lock().note(key(timeline.endpoint()), timeline.endpoint());
}

/// Returns the slot of a timeline within this process, both sides of which have ended.
pub(crate) fn return_own_slot(exporters: &Timeline, importers: &Timeline) {
    let Some(returned) = importers.endpoint().report() else { return };
    give_back(exporters, returned);
}

fn give_back(timeline: &Timeline, returned: Returned) {
    let key = key(timeline.endpoint());
    let mut own = lock();
    own.returned(key, returned);
    own.give_back(key);
    drop(own);
    drop_unused_pages();
}

/// Drops the pages of this process alone that no timeline uses. While any timeline is live a device does not forget a page,
/// so pages are kept then, to be used again.
fn drop_unused_pages() {
    if any_timeline_is_live() {
        return;
    }
    if let Ok(mut own) = OWN.try_lock() {
        own.drop_empty_pages();
    }
}

/// A counter that no other process sees: it orders streams of this process among each other.
#[derive(Debug)]
pub(crate) struct OwnCounter {
    timeline: Timeline,
    owner: Owner,
}

impl OwnCounter {
    pub(crate) fn new(backend: &Arc<dyn DeviceIpc>) -> Result<Arc<Self>> {
        let place = take_own_slot()?;
        let timeline = Timeline::new(place, Side::Exporter, Arc::clone(backend), std::process::id());
        note_own_slot(&timeline);
        Ok(Arc::new(Self { timeline, owner: Owner::current() }))
    }

    /// Makes the stream set the counter to `value` behind its earlier work. Waits for the stream where that cannot be submitted:
    /// no value may overtake earlier work.
    pub(crate) fn mark(&self, value: u64, stream: BorrowedStream<'_>) {
        let Err(error) = self.timeline.signal(value, &stream) else { return };
        tracing::warn!(target: crate::os::log::TIMELINE, %error, "a stream cannot be ordered before others, and is waited for");
        let waited = self.timeline.endpoint().backend.memory().synchronize(stream);
        if let Err(error) = waited.and_then(|()| self.timeline.signal_now(value)) {
            tracing::warn!(target: crate::os::log::TIMELINE, %error, "streams are no longer ordered among each other");
        }
    }

    /// Makes the stream wait for all [marks](Self::mark). No driver call where they have arrived.
    pub(crate) fn wait_for_all(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.timeline.wait_for_own(u64::MAX, stream)
    }
}

impl Timeline {
    /// Signals as [`signal`](Self::signal), behind all earlier signals of this kind, on any stream: no value overtakes another.
    /// `order` counts the signals that have arrived; a peer can write this timeline's own words. Streams are not compared, as a
    /// handle may name another stream by now.
    pub(crate) fn signal_in_turn(
        &self,
        value: u64,
        stream: BorrowedStream<'_>,
        order: &OwnCounter,
    ) -> Result<()> {
        self.endpoint.check_usable(stream)?;
        self.endpoint.check()?;
        order.wait_for_all(stream)?;
        self.signal(value, &stream)?;
        order.mark(value, stream);
        Ok(())
    }
}

impl Deref for OwnCounter {
    type Target = Timeline;

    fn deref(&self) -> &Timeline {
        &self.timeline
    }
}

impl Drop for OwnCounter {
    fn drop(&mut self) {
        if self.owner.is_here() {
            self.timeline.endpoint().end(Termination::Released);
            give_back(&self.timeline, Returned::default());
        }
    }
}
