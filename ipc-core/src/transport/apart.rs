//! Questions whose answers may take long.
//!
//! Whoever waits for an answer in a turn of its own keeps all others of its process from the socket, which is right for
//! what a broker answers at once. A copy waits for devices, and for other copies: its answers are taken by whoever reads,
//! mostly the poller, and handed to those who wait.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::Deadline;
use super::socket::ReceivedFds;
use crate::model::error::{Error, Result};
use crate::wire::protocol::{Reply, RequestId};

/// The numbers of these requests have this bit, so that they are never those of a caller in its turn.
const APART: u64 = 1 << 63;

/// The questions of one link.
#[derive(Default)]
pub(super) struct Apart {
    last: u64,
    /// `None` for one that was given up: its answer is still to come.
    open: HashMap<u64, Option<Arc<Answer>>>,
}

/// What an answer is put into.
#[derive(Default)]
pub(super) struct Answer {
    answered: Mutex<Option<Answered>>,
    changed: Condvar,
}

/// How a question was answered.
pub(super) enum Answered {
    With(Reply, ReceivedFds),
    /// The exporter has gone.
    ByTheEnd,
}

impl Apart {
    /// Does the message answer such a question?
    pub(super) fn is_of_it(reply: &Reply) -> bool {
        request_of(reply).is_some_and(|request| request.0 & APART != 0)
    }

    pub(super) fn begin(&mut self) -> (RequestId, Arc<Answer>) {
        self.last += 1;
        let answer = Arc::new(Answer::default());
        self.open.insert(self.last | APART, Some(Arc::clone(&answer)));
        (RequestId(self.last | APART), answer)
    }

    /// Hands an answer over. False where nobody waits for it any longer.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] where nobody has asked.
    pub(super) fn deliver(&mut self, reply: Reply, fds: ReceivedFds) -> Result<bool> {
        let asked = request_of(&reply).and_then(|request| self.open.remove(&request.0));
        let asked = asked.ok_or_else(|| Error::Protocol("it answered what nobody had asked".into()))?;
        let waited_for = asked.is_some();
        if let Some(answer) = asked {
            answer.put(Answered::With(reply, fds));
        }
        Ok(waited_for)
    }

    /// Nobody waits any longer for what has not come yet.
    pub(super) fn give_up(&mut self, request: RequestId) {
        if let Some(asked) = self.open.get_mut(&request.0) {
            *asked = None;
        }
    }

    /// The exporter has gone.
    pub(super) fn end(self) {
        for answer in self.open.into_values().flatten() {
            answer.put(Answered::ByTheEnd);
        }
    }
}

impl Answer {
    fn put(&self, answered: Answered) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(answered);
        self.changed.notify_all();
    }

    /// What has come so far.
    pub(super) fn take(&self) -> Option<Answered> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits for the answer; `None` when the time is over.
    pub(super) fn wait(&self, deadline: Deadline) -> Option<Answered> {
        let answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        let nothing = |answered: &mut Option<Answered>| answered.is_none();
        let waited = self.changed.wait_timeout_while(answered, deadline.left(), nothing);
        waited.unwrap_or_else(PoisonError::into_inner).0.take()
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
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::lease::LeaseId;

    fn staging(request: RequestId) -> Reply {
        Reply::Staging { request, lease: LeaseId(1), chunk_bytes: 1 << 16, bytes: 1 }
    }

    #[test]
    fn an_answer_reaches_who_asked_once_and_one_given_up_is_told_from_one_never_asked() {
        let mut apart = Apart::default();
        let ((first, answer), (second, _)) = (apart.begin(), apart.begin());
        assert!(Apart::is_of_it(&staging(first)) && !Apart::is_of_it(&staging(RequestId(1))));
        assert!(apart.deliver(staging(first), ReceivedFds::default()).unwrap());
        let waited = answer.wait(Deadline::after(Duration::ZERO));
        assert!(matches!(waited, Some(Answered::With(Reply::Staging { .. }, _))));
        assert!(
            matches!(apart.deliver(staging(first), ReceivedFds::default()), Err(Error::Protocol(_))),
            "twice"
        );
        apart.give_up(second);
        assert!(!apart.deliver(staging(second), ReceivedFds::default()).unwrap());
        assert!(matches!(apart.deliver(staging(second), ReceivedFds::default()), Err(Error::Protocol(_))));
    }

    #[test]
    fn the_exporters_end_answers_everybody() {
        let mut apart = Apart::default();
        let (_, answer) = apart.begin();
        assert!(answer.wait(Deadline::after(Duration::ZERO)).is_none());
        apart.end();
        assert!(matches!(answer.wait(Deadline::after(Duration::ZERO)), Some(Answered::ByTheEnd)));
    }
}
