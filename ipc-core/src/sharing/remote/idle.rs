//! The importer's control connections without a lease, which it keeps for the next open of the same export.
//!
//! A new connection costs several round trips and the start of a thread in the exporter, about a third of the time of a copy
//! of few bytes. The worker closes connections that have not been used for a while.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::control::Control;
use crate::os::clock;
use crate::sharing::Runtime;
use crate::wire::Token;
use crate::wire::descriptor::ExportId;

/// The time for which a connection is kept. The exporter keeps it longer.
const KEEP: Duration = Duration::from_secs(5);

/// Maximum number of connections of a process that are kept. The oldest one is closed for a further one.
const MAX_KEPT: usize = 16;

/// The properties of a connection: it serves any lease for which they are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionKey {
    pub(super) address: SocketAddr,
    pub(super) export: ExportId,
    /// Proved by both sides.
    pub(super) token: Token,
}

/// The connections of a process that are kept.
#[derive(Debug, Default)]
pub(crate) struct IdleConnections {
    state: Mutex<IdleState>,
}

#[derive(Debug, Default)]
struct IdleState {
    /// In the order of their times.
    kept: VecDeque<IdleControl>,
    /// Whether the worker looks at them when the oldest one is due.
    is_watched: bool,
}

#[derive(Debug)]
struct IdleControl {
    key: ConnectionKey,
    control: Control,
    until: Instant,
}

impl IdleConnections {
    fn state(&self) -> MutexGuard<'_, IdleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection with these properties that the exporter has not closed.
    pub(super) fn take(&self, key: &ConnectionKey) -> Option<Control> {
        loop {
            let kept = {
                let mut state = self.state();
                let newest = state.kept.iter().rposition(|kept| kept.key == *key)?;
                state.kept.remove(newest)?
            };
            // It is readable if the exporter has closed it, or has sent a message that nothing requested.
            if !kept.control.wait(Duration::ZERO, None) {
                return Some(kept.control);
            }
        }
    }

    /// Keeps a connection whose lease has been released, and on which no message of the exporter is outstanding.
    pub(super) fn keep(&self, runtime: &'static Runtime, key: ConnectionKey, control: Control) {
        let mut state = self.state();
        let until = clock::now() + KEEP;
        let oldest = if state.kept.len() < MAX_KEPT { None } else { state.kept.pop_front() };
        state.kept.push_back(IdleControl { key, control, until });
        let is_watched = std::mem::replace(&mut state.is_watched, true);
        drop(state);
        drop(oldest);
        if !is_watched {
            runtime.worker.submit_at(until, move || runtime.idle_connections.close_due(runtime));
        }
    }

    /// Closes the connections that are due, on the worker, and looks again when the next one is.
    fn close_due(&self, runtime: &'static Runtime) {
        let now = clock::now();
        let mut state = self.state();
        let due = state.kept.iter().take_while(|kept| kept.until <= now).count();
        let closed: Vec<_> = state.kept.drain(..due).collect();
        let next = state.kept.front().map(|kept| kept.until);
        state.is_watched = next.is_some();
        drop(state);
        drop(closed);
        if let Some(next) = next {
            runtime.worker.submit_at(next, move || runtime.idle_connections.close_due(runtime));
        }
    }
}
