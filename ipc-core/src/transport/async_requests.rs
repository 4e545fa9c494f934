//! Asynchronous requests: those whose replies may take long.
//!
//! A caller that waits for its reply at the socket keeps the other callers of its process from the socket, which is right for
//! requests that a broker answers at once. A copy waits for devices, and for other copies: the thread that reads, mostly the
//! poller, takes such a reply and hands it to the caller.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Deadline;
use super::socket::ReceivedFds;
use crate::model::error::{Error, Result};
use crate::os::Condvar;
use crate::wire::protocol::{Reply, RequestId};

/// A bit of the ids of asynchronous requests, which no other request has.
const ASYNC_BIT: u64 = 1 << 63;

/// The asynchronous requests of one client.
#[derive(Default)]
pub(super) struct AsyncRequests {
    last: u64,
    /// `None` for an abandoned request whose reply has not arrived yet.
    open: HashMap<u64, Option<Arc<AsyncReply>>>,
}

/// The place of a reply that has not arrived yet.
#[derive(Default)]
pub(crate) struct AsyncReply {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

/// The outcome of an asynchronous request.
pub(crate) enum Outcome {
    Reply(Reply, ReceivedFds),
    /// The exporter has terminated.
    ExporterGone,
}

impl AsyncRequests {
    /// Returns whether the message is the reply to an asynchronous request.
    pub(super) fn has_request_of(reply: &Reply) -> bool {
        request_of(reply).is_some_and(|request| request.0 & ASYNC_BIT != 0)
    }

    /// Begins a request.
    pub(super) fn begin(&mut self) -> (RequestId, Arc<AsyncReply>) {
        self.last += 1;
        let answer = Arc::new(AsyncReply::default());
        self.open.insert(self.last | ASYNC_BIT, Some(Arc::clone(&answer)));
        (RequestId(self.last | ASYNC_BIT), answer)
    }

    /// Hands a reply over. False where its request was abandoned.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for a reply to no request.
    pub(super) fn deliver(&mut self, reply: Reply, fds: ReceivedFds) -> Result<bool> {
        let asked = request_of(&reply).and_then(|request| self.open.remove(&request.0));
        let asked = asked.ok_or_else(|| Error::Protocol("it sent a reply without a request".into()))?;
        let waited_for = asked.is_some();
        if let Some(answer) = asked {
            answer.put(Outcome::Reply(reply, fds));
        }
        Ok(waited_for)
    }

    /// Abandons a request whose reply has not arrived yet.
    pub(super) fn abandon(&mut self, request: RequestId) {
        if let Some(asked) = self.open.get_mut(&request.0) {
            *asked = None;
        }
    }

    /// Ends all requests: the exporter has terminated.
    pub(super) fn end(self) {
        for answer in self.open.into_values().flatten() {
            answer.put(Outcome::ExporterGone);
        }
    }
}

impl AsyncReply {
    fn put(&self, answered: Outcome) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(answered);
        self.changed.notify_all();
    }

    /// Takes the outcome, where there is one.
    pub(crate) fn take(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits for the outcome; `None` after the deadline.
    pub(crate) fn wait(&self, deadline: Deadline) -> Option<Outcome> {
        let answered = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let nothing = |answered: &mut Option<Outcome>| answered.is_none();
        self.changed.wait_timeout_while(&self.outcome, answered, deadline.left(), nothing).take()
    }
}

fn request_of(reply: &Reply) -> Option<RequestId> {
    match reply {
        Reply::Staging { request, .. } | Reply::Staged { request, .. } | Reply::Refused { request, .. } => {
            Some(*request)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
