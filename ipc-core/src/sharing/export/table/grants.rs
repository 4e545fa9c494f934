//! Grants: rights to open an export once, which travel with the messages of a channel.
//!
//! A sender may drop an export as soon as it has sent it. The grant, a private token in the export's entry, keeps the memory
//! until the message is opened. It ends when its bearer begins a lease with it or returns it, or when the channel has no peer
//! any longer.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::{Entry, ExportTable, State};
use crate::model::error::{Error, Result};
use crate::model::lease::{Holder, LeaseState};
use crate::sharing::Runtime;
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

/// The grants of an export by token. The hash that finds a token has a secret key, so the search time reveals nothing about the
/// bytes.
pub(super) type Grants = HashMap<[u8; 16], Grant>;

#[derive(Debug)]
pub(super) struct Grant {
    channel: ChannelId,
    since: Instant,
}

/// The unused grants that a channel has sent. It exists, empty, as long as the channel does.
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
        entry.grants.insert(token.to_bytes(), Grant { channel: bearer.channel, since: Instant::now() });
        entry.tell_change();
        let begin = || InFlight { bearer: bearer.clone(), grants: HashSet::new(), keeper: None };
        let in_flight = state.in_flight.entry(bearer.channel).or_insert_with(begin);
        in_flight.grants.insert((export, token.to_bytes()));
        Ok(token)
    }

    /// Ends a grant, unless it has ended.
    pub(crate) fn end_grant(&self, export: ExportId, token: Token) {
        let mut state = self.lock();
        if state.take_grant(export, &token.to_bytes()) {
            self.retire_if_free(&mut state, export);
            self.changed.notify_all();
        }
    }

    /// Ends the grants of a channel whose peer has terminated.
    pub(crate) fn end_grants_of(&self, channel: ChannelId) {
        let mut state = self.lock();
        let Some(in_flight) = state.in_flight.remove(&channel) else { return };
        for (export, token) in &in_flight.grants {
            if let Some(entry) = state.exports.get_mut(export) {
                entry.grants.remove(token);
                entry.tell_change();
            }
            self.retire_if_free(&mut state, *export);
        }
        self.changed.notify_all();
        drop(state);
        in_flight.release();
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
    pub(super) fn take_grant(&mut self, export: ExportId, token: &[u8; 16]) -> bool {
        let Some(entry) = self.exports.get_mut(&export) else { return false };
        let Some(grant) = entry.grants.remove(token) else { return false };
        entry.tell_change();
        if let Some(in_flight) = self.in_flight.get_mut(&grant.channel) {
            in_flight.grants.remove(&(export, *token));
            if in_flight.grants.is_empty()
                && in_flight.keeper.is_some()
                && let Some(in_flight) = self.in_flight.remove(&grant.channel)
            {
                in_flight.release();
            }
        }
        true
    }

    /// Ends all grants of an export.
    pub(super) fn take_grants(&mut self, export: ExportId) {
        let Some(entry) = self.exports.get(&export) else { return };
        for token in entry.grants.keys().copied().collect::<Vec<_>>() {
            self.take_grant(export, &token);
        }
    }

    /// Returns the peers that have received the export in a message and have not opened it yet, each once.
    pub(super) fn bearers(&self, entry: &Entry) -> Vec<Holder> {
        let mut since: HashMap<ChannelId, Instant> = HashMap::new();
        for grant in entry.grants.values() {
            let first = since.entry(grant.channel).or_insert(grant.since);
            *first = grant.since.min(*first);
        }
        let holder = |(channel, since)| {
            let bearer = &self.in_flight.get(&channel)?.bearer;
            let program = format!("{}, in a message that it has not opened", bearer.program);
            let state = LeaseState::InMessage;
            Some(Holder { pid: bearer.pid, program, bytes: entry.bytes, since, state })
        };
        since.into_iter().filter_map(holder).collect()
    }
}

impl InFlight {
    /// Drops the channel on the worker: it may have the last reference to the caller's backend.
    fn release(self) {
        if let (Some(keeper), Some(runtime)) = (self.keeper, Runtime::existing()) {
            runtime.worker.submit(move || drop(keeper));
        }
    }
}
