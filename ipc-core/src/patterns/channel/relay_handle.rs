//! The handle that a connection has of its relay, and its relay of it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::model::error::{Error, Result};
use crate::os::{Condvar, Readiness, clock};
use crate::sharing::import::GrantReturn;
use crate::wire::Token;
use crate::wire::descriptor::ExportId;

/// Maximum time for which a drop waits until the other process knows it.
pub(super) const CLOSING: Duration = Duration::from_secs(1);

/// The connection's view of its relay.
pub(super) struct Relay {
    /// Wakes the sender: a counter or a grant has changed.
    pub(super) wake: Readiness,
    /// Whether this process waits until the socket has room.
    pub(super) wants_socket: AtomicBool,
    state: Mutex<RelayState>,
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct RelayState {
    /// Grants of the other process that are no longer needed.
    pub(super) ended: Vec<(ExportId, Token)>,
    /// The directions that this process has closed, as the other process has confirmed them.
    pub(super) seen: u64,
    /// Whether the connection has ended.
    pub(super) is_over: bool,
}

impl Relay {
    pub(super) fn new() -> Result<Arc<Self>> {
        let wake = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
        let (wants_socket, state) = (AtomicBool::new(false), Mutex::default());
        Ok(Arc::new(Self { wake, wants_socket, state, changed: Condvar::new() }))
    }

    /// Asks for a wake-up when the sender has taken a packet out of the socket. The caller then tries again.
    pub(super) fn ask_for_socket(&self) {
        self.wants_socket.store(true, Ordering::SeqCst);
    }

    /// Reports that a counter of this process has changed.
    pub(super) fn wake(&self) {
        self.wake.set();
    }

    /// Waits until the other process knows that these directions are closed, which it does after it has all messages.
    pub(super) fn wait_seen(&self, directions: u64, timeout: Duration) {
        let until = clock::now() + timeout;
        let mut state = self.lock();
        while !state.is_over && state.seen & directions != directions {
            let left = clock::left(until);
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(&self.state, state, left);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GrantReturn for Relay {
    fn give_back(&self, export: ExportId, token: Token) {
        self.lock().ended.push((export, token));
        self.wake();
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").finish_non_exhaustive()
    }
}
