//! Waits for the release of exports. A long one is logged, once.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use super::{Entry, ExportTable, State};
use crate::model::lease::Holders;
use crate::os::clock;
use crate::os::log::EXPORT;
use crate::wire::descriptor::ExportId;

/// The time after which a wait for the release of an export is logged.
const LONG: Duration = Duration::from_secs(5);

/// Interval between two checks of lease states by a thread that waits for their end.
const LOOK_AT_STATES: Duration = Duration::from_millis(50);

/// The wait of a thread for the release of an export, or several in sequence if each has a time limit.
#[derive(Debug)]
pub(super) struct Waiting {
    since: Instant,
    is_logged: bool,
}

impl Waiting {
    const fn new(since: Instant) -> Self {
        Self { since, is_logged: false }
    }

    /// Returns the time of the wait if it is to be logged: when it has become long, once.
    fn due(&mut self, now: Instant) -> Option<Duration> {
        let waited = now.saturating_duration_since(self.since);
        let is_due = waited >= LONG && !self.is_logged;
        self.is_logged |= is_due;
        is_due.then_some(waited)
    }
}

impl ExportTable {
    /// Waits until the export has been opened at least once and has no lease.
    pub(crate) fn wait_released(&self, export: ExportId, until: Instant) -> Result<(), Holders> {
        self.recall(export);
        self.wait(export, until, |entry| {
            entry.is_none_or(|entry| entry.opened > 0 && entry.leases.is_empty() && entry.grants.is_empty())
        })
    }

    /// Waits until a dropped export's owner has been dropped.
    pub(crate) fn wait_retired(&self, export: ExportId, until: Instant) -> Result<(), Holders> {
        self.wait(export, until, |entry| entry.is_none())
    }

    /// Waits until the owners of all exports have been dropped.
    pub(crate) fn wait_all_retired(&self, until: Instant) -> Result<(), Holders> {
        let mut state = self.lock();
        loop {
            let exports: Vec<ExportId> = state.exports.keys().copied().collect();
            exports.into_iter().for_each(|export| self.reclaim_idle(&mut state, export));
            if state.exports.is_empty() {
                return Ok(());
            }
            let left = clock::left(until);
            if left.is_zero() {
                let mut all = Holders::default();
                for holders in state.exports.keys().map(|export| state.holders(*export)) {
                    all.now.extend(holders.now);
                    all.ever += holders.ever;
                }
                return Err(all);
            }
            state = self.wait_for_change(state, left, true);
        }
    }

    /// Waits until `done` returns true or the deadline passes; the error is the holders at that time.
    pub(super) fn wait(
        &self,
        export: ExportId,
        until: Instant,
        done: impl Fn(Option<&Entry>) -> bool,
    ) -> Result<(), Holders> {
        let mut state = self.lock();
        loop {
            // Also a lease that has become idle since, and whose importer does not answer.
            self.reclaim_idle(&mut state, export);
            let mut entry = state.exports.get_mut(&export);
            let is_done = done(entry.as_deref().map(|entry| &**entry));
            // Someone waits for the release, and not only for an open.
            let has_leases = entry
                .as_deref()
                .is_some_and(|entry| (entry.recalled || entry.dropped) && !entry.leases.is_empty());
            if let Some(entry) = entry.as_mut().filter(|_| is_done || !has_leases) {
                entry.waiting = None;
            }
            if is_done {
                return Ok(());
            }
            let now = clock::now();
            let left = until.saturating_duration_since(now);
            if left.is_zero() {
                return Err(state.holders(export));
            }
            if let Some(waited) = entry
                .filter(|_| has_leases)
                .and_then(|entry| entry.waiting.get_or_insert_with(|| Box::new(Waiting::new(now))).due(now))
            {
                let holders = state.holders(export);
                // A subscriber may call the table.
                drop(state);
                self.home.count(|metrics| metrics.still_held_total.add(1));
                tracing::warn!(target: EXPORT, %holders, waited_ms = waited.as_millis() as u64, "an export is still held");
                state = self.lock();
                continue;
            }
            state = self.wait_for_change(state, left, has_leases);
        }
    }

    /// Waits for a change of the table. While there are leases it returns early to check their states: an importer that was
    /// stopped right after the release of its last mapping sends no notification.
    fn wait_for_change<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        left: Duration,
        has_leases: bool,
    ) -> MutexGuard<'a, State> {
        let left = if has_leases { left.min(LOOK_AT_STATES) } else { left };
        self.changed.wait_timeout(&self.state, state, left)
    }
}

#[cfg(test)]
mod tests;
