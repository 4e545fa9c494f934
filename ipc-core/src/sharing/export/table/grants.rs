//! Grants: rights to open an export once, which travel with the messages of a channel, or as bytes over any transport.
//!
//! A sender may drop an export as soon as it has sent it. What keeps the memory until the message is opened is the grant:
//! a token of its own in the export's entry. It ends when its bearer has begun a lease with it, gives it back, or when the
//! channel that it was sent over has no other end any longer. No connection shows whether a grant that travels as bytes still
//! has a bearer, so it has a time limit instead.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Entry, ExportTable, State};
use crate::model::error::{Error, Result};
use crate::model::lease::{Holder, LeaseState};
use crate::os::log::Throttle;
use crate::os::{TimerId, Timers, clock};
use crate::sharing::Home;
use crate::transport::Allotment;
use crate::wire::Token;
use crate::wire::descriptor::ExportId;

/// The number of a channel of this process. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ChannelId(pub(crate) u64);

/// The peer of a channel for display.
#[derive(Clone, Debug)]
pub(crate) struct Bearer {
    pub(crate) channel: ChannelId,
    pub(crate) pid: u32,
    pub(crate) program: Arc<str>,
}

/// The grants of an export, by their tokens. A token is found by a hash whose key nobody knows, so the time that it takes
/// tells nothing about the bytes.
pub(super) type Grants = HashMap<[u8; 16], OpenGrant>;

/// Maximum number of grants of an export when one with a time limit begins.
const MAX_TIMED_GRANTS: usize = 1 << 20;

/// A time that is later than any time limit.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Minimum interval between two looks for grants at their time limits.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of grants that end in one lock of the table.
const SLICE: usize = 256;

/// A grant that has not ended.
#[derive(Debug)]
pub(super) struct OpenGrant {
    end: GrantEnd,
    since: Instant,
    /// That of the importer that has asked for it.
    _allotment: Option<Allotment>,
}

/// The event that ends a grant that its bearer neither uses nor gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum GrantEnd {
    /// The end of the channel that carried it.
    Channel(ChannelId),
    /// A point in time.
    At(TimerId),
}

/// The grants with a time limit, by their ends.
#[derive(Debug, Default)]
pub(super) struct TimedGrants {
    by_end: Timers<(ExportId, [u8; 16])>,
    /// The poller looks at this time.
    next_look: Option<Instant>,
}

/// The grants that a channel has sent and its peer has not used yet. Kept, empty, as long as the channel exists.
pub(super) struct InFlight {
    bearer: Bearer,
    grants: HashSet<(ExportId, [u8; 16])>,
    /// The channel, once its guard has been dropped here: its socket reports the termination of the bearer.
    keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "InFlight({} grants)", self.grants.len())
    }
}

impl ExportTable {
    /// Begins a grant of an export for the peer of a channel.
    pub(crate) fn begin_grant(&self, export: ExportId, bearer: &Bearer) -> Result<Token> {
        let mut state = self.lock();
        let state = &mut *state;
        let token = state.tokens.take()?;
        let entry = state.exports.get_mut(&export).filter(|entry| !entry.dropped);
        // Asks the kernel for the process id in this case only.
        let dropped = || Error::ExportDropped { pid: std::process::id() };
        let entry = entry.ok_or_else(dropped)?;
        let end = GrantEnd::Channel(bearer.channel);
        entry.grants.insert(token.to_bytes(), OpenGrant { end, since: clock::now(), _allotment: None });
        entry.notify_watchers();
        let begin = || InFlight { bearer: bearer.clone(), grants: HashSet::new(), keeper: None };
        let in_flight = state.in_flight.entry(bearer.channel).or_insert_with(begin);
        in_flight.grants.insert((export, token.to_bytes()));
        Ok(token)
    }

    /// Begins a grant of an export that ends at a time limit, with the allotment of the importer that asks for it.
    pub(crate) fn begin_timed_grant(
        &self,
        export: ExportId,
        limit: Duration,
        allotment: Option<Allotment>,
    ) -> Result<Token> {
        let mut state = self.lock();
        let state = &mut *state;
        let token = state.tokens.take()?;
        let entry = state.exports.get_mut(&export).filter(|entry| !entry.dropped);
        let entry = entry.ok_or_else(|| Error::ExportDropped { pid: std::process::id() })?;
        if entry.grants.len() >= MAX_TIMED_GRANTS {
            return Err(Error::QuotaExceeded(format!(
                "the export has {MAX_TIMED_GRANTS} grants that no process has used; choose a shorter time limit"
            )));
        }
        let since = clock::now();
        // An end that the clock cannot represent is one that never comes.
        let at = since.checked_add(limit).unwrap_or(since + FAR);
        let end = GrantEnd::At(state.timed.by_end.insert(at, (export, token.to_bytes())));
        let grant = OpenGrant { end, since, _allotment: allotment };
        entry.grants.insert(token.to_bytes(), grant);
        entry.notify_watchers();
        if state.timed.next_look.is_none_or(|look| at < look) {
            state.timed.next_look = Some(at);
            if let Some(runtime) = self.home.here() {
                runtime.poller.expire_grants_at(at);
            }
        }
        Ok(token)
    }

    /// Ends grants whose time limit has passed, a slice of them. Returns the time of the next look, which is now if there are more.
    pub(crate) fn expire_grants(&self, now: Instant) -> Option<Instant> {
        let mut state = self.lock();
        let mut ended = 0;
        while ended < SLICE
            && let Some((export, token)) = state.timed.by_end.take_due(now)
        {
            state.take_grant(export, &token, &self.home);
            self.retire_if_free(&mut state, export);
            static EXPIRED: Throttle = Throttle::new();
            if let Some(count) = EXPIRED.count() {
                tracing::info!(target: crate::os::log::EXPORT, %export, count, "a grant has ended at its time limit, unused");
            }
            ended += 1;
        }
        if ended > 0 {
            self.changed.notify_all();
        }
        let earliest = if ended == SLICE { now } else { now + EXPIRY_INTERVAL };
        let first = state.timed.by_end.next().map(|end| end.max(earliest));
        state.timed.next_look = first;
        first
    }

    /// Ends a grant, unless it has ended.
    pub(crate) fn end_grant(&self, export: ExportId, token: Token) {
        let mut state = self.lock();
        if state.take_grant(export, &token.to_bytes(), &self.home) {
            self.retire_if_free(&mut state, export);
            self.changed.notify_all();
        }
    }

    /// Ends the grants of a channel whose peer has terminated.
    pub(crate) fn end_grants_of(&self, channel: ChannelId) {
        let mut state = self.lock();
        let Some(mut in_flight) = state.in_flight.remove(&channel) else { return };
        let mut grants = std::mem::take(&mut in_flight.grants).into_iter();
        loop {
            for (export, token) in grants.by_ref().take(SLICE) {
                if let Some(entry) = state.exports.get_mut(&export) {
                    entry.grants.remove(&token);
                    entry.notify_watchers();
                }
                self.retire_if_free(&mut state, export);
            }
            self.changed.notify_all();
            drop(state);
            if grants.len() == 0 {
                break;
            }
            state = self.lock();
        }
        in_flight.release(&self.home);
    }

    /// Keeps a channel whose guard is dropped as long as a grant that it has sent may still be used.
    pub(crate) fn keep_while_granted(&self, channel: ChannelId, keeper: Arc<dyn Any + Send + Sync>) {
        let mut state = self.lock();
        let keeper = match state.in_flight.get_mut(&channel) {
            Some(in_flight) if !in_flight.grants.is_empty() => in_flight.keeper.replace(keeper),
            _ => Some(keeper),
        };
        // It may be the last reference to the caller's backend, so it is not dropped under the lock.
        drop(state);
        drop(keeper);
    }
}

impl State {
    /// Removes a grant. Returns whether there was one.
    pub(super) fn take_grant(&mut self, export: ExportId, token: &[u8; 16], home: &Home) -> bool {
        let Some(entry) = self.exports.get_mut(&export) else { return false };
        let Some(grant) = entry.grants.remove(token) else { return false };
        entry.notify_watchers();
        let channel = match grant.end {
            GrantEnd::Channel(channel) => channel,
            GrantEnd::At(end) => {
                self.timed.by_end.remove(end);
                return true;
            }
        };
        if let Some(in_flight) = self.in_flight.get_mut(&channel) {
            in_flight.grants.remove(&(export, *token));
            if in_flight.grants.is_empty()
                && in_flight.keeper.is_some()
                && let Some(in_flight) = self.in_flight.remove(&channel)
            {
                in_flight.release(home);
            }
        }
        true
    }

    /// Ends all grants of an export.
    pub(super) fn take_grants(&mut self, export: ExportId, home: &Home) {
        let Some(entry) = self.exports.get(&export) else { return };
        for token in entry.grants.keys().copied().collect::<Vec<_>>() {
            self.take_grant(export, &token, home);
        }
    }

    /// Returns the peers that an export has been sent to and that have not opened it yet, each once. The bearers of grants that
    /// travel as bytes are not known, and are returned as one.
    pub(super) fn bearers(&self, entry: &Entry) -> Vec<Holder> {
        let mut since: HashMap<Option<ChannelId>, (Instant, usize)> = HashMap::new();
        for grant in entry.grants.values() {
            let channel = match grant.end {
                GrantEnd::Channel(channel) => Some(channel),
                GrantEnd::At(_) => None,
            };
            let (first, count) = since.entry(channel).or_insert((grant.since, 0));
            *first = grant.since.min(*first);
            *count += 1;
        }
        let holder = |(channel, (since, count)): (Option<ChannelId>, (Instant, usize))| {
            let (pid, program) = match channel {
                None => (0, format!("not known; grants that no process has used: {count}")),
                Some(channel) => {
                    let bearer = &self.in_flight.get(&channel)?.bearer;
                    (bearer.pid, format!("{}, in a message that it has not opened", bearer.program))
                }
            };
            let since = clock::to_system(since);
            Some(Holder { pid, program, bytes: entry.bytes, since, state: LeaseState::InMessage })
        };
        since.into_iter().filter_map(holder).collect()
    }
}

impl InFlight {
    /// Drops the channel on the worker: it may have the last reference to the caller's backend.
    fn release(self, home: &Home) {
        if let (Some(keeper), Some(runtime)) = (self.keeper, home.here()) {
            runtime.worker.submit(move || drop(keeper));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Access;
    use crate::sharing::export::Shared;
    use crate::sharing::export::table::NewExport;
    use crate::transport::AllowList;

    #[test]
    fn grants_that_end_together_end_in_slices() {
        let table = ExportTable::default();
        let shared = Shared {
            ready: None,
            allocations: [].into(),
            regions: [].into(),
            remote: None,
            owner: None,
            keeps: false,
        };
        let token = table.lock().tokens.take().unwrap();
        let export = table.insert(NewExport {
            borrowed: None,
            backend: "test",
            bytes: 0,
            access: Access::ReadOnly,
            allow: AllowList::own_user(),
            ahead: false,
            claims: None,
            token,
            shared,
        });
        for _ in 0..2 * SLICE + 1 {
            table.begin_timed_grant(export, Duration::ZERO, None).unwrap();
        }
        let left = || table.lock().exports[&export].grants.len();
        let now = Instant::now();
        for expected in [SLICE + 1, 1] {
            assert_eq!(table.expire_grants(now), Some(now), "the rest is due");
            assert_eq!(left(), expected);
        }
        assert_eq!((table.expire_grants(now), left()), (None, 0));
    }
}
