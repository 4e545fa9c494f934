//! Counters of this process alone.
//!
//! Streams of this process are ordered among each other by these, and never by a word that a peer maps: a peer could set
//! such a word back, and the streams would wait for ever.

use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::slots::{Place, Slots};
use super::{End, Ends, Side, Timeline};
use crate::backend::DeviceIpc;
use crate::backend::stream::BorrowedStream;
use crate::model::error::Result;
use crate::os::process::Owner;
use crate::sharing::Runtime;
use crate::wire::Returned;

/// The slots of this process alone, by the address of their timeline's state.
static OWN: LazyLock<Mutex<Slots<usize>>> = LazyLock::new(|| Mutex::new(Slots::new(false)));

fn lock() -> MutexGuard<'static, Slots<usize>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(ends: &Arc<Ends>) -> usize {
    Arc::as_ptr(ends) as usize
}

/// A slot for a timeline between two parts of this process.
pub(crate) fn take_own_slot() -> Result<Place> {
    // A forked child has the parent's pages, and perhaps its lock.
    Runtime::get()?;
    lock().take()
}

/// Notes whose slot it is.
pub(crate) fn note_own_slot(timeline: &Timeline) {
    lock().note(key(timeline.ends()), timeline);
}

/// Gives back the slot of a timeline within this process, of which both sides have ended.
pub(crate) fn return_own_slot(exporters: &Timeline, importers: &Timeline) {
    let Some(returned) = importers.ends().report() else { return };
    give_back(exporters, returned);
}

fn give_back(timeline: &Timeline, returned: Returned) {
    let key = key(timeline.ends());
    let mut own = lock();
    own.returned(key, returned);
    own.give_back(key);
    drop(own);
    drop_unused_own_pages();
}

/// Drops the pages of this process alone that no timeline uses. While any timeline is live a device does not forget a page,
/// so pages are kept then, to be used again.
pub(crate) fn drop_unused_own_pages() {
    if crate::sharing::host_pages::any_timeline_is_live() {
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

    /// The stream sets the counter to `value` behind what was submitted to it so far. Where that cannot be submitted, the
    /// stream is waited for: what was submitted before must not be overtaken.
    pub(crate) fn mark(&self, value: u64, stream: BorrowedStream<'_>) {
        let Err(error) = self.timeline.signal(value, &stream) else { return };
        tracing::warn!(%error, "a stream cannot be ordered before others, and is waited for");
        let waited = self.timeline.ends().backend.memory().synchronize(stream);
        if let Err(error) = waited.and_then(|()| self.timeline.signal_now(value)) {
            tracing::warn!(%error, "streams are no longer ordered among each other");
        }
    }

    /// The stream waits for everything that was [marked](Self::mark). No driver call where that has arrived.
    pub(crate) fn wait_for_all(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.timeline.wait_for_own(u64::MAX, stream)
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
            self.timeline.ends().end(End::Released);
            give_back(&self.timeline, Returned::default());
        }
    }
}
