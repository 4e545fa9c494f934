//! The answers of a keeper, on the threads of the library.
//!
//! The poller watches the descriptor of the listener and, once it is readable, has the worker answer. It watches again when the
//! worker has answered every process: the poller takes no message, and at most one job for a keeper is queued.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use super::{Announcement, FORM};
use crate::model::error::{Error, ErrorKind, Result};
use crate::model::lease::LeaseState;
use crate::os::clock;
use crate::os::log::{self, Throttle};
use crate::patterns::channel::{Channel, Listener, Message};
use crate::sharing::export::Export;
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::{WatchedSocket, new_socket_number};

/// Maximum number of processes that one job answers. Further ones are answered behind the other jobs of the worker.
const MAX_ANSWERS: usize = 16;

/// The pause after a failure of this process, such as a lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// The answer of a keeper.
#[derive(Clone, Debug)]
pub(super) struct Current {
    pub(super) version: u64,
    pub(super) export: Arc<Export>,
}

/// A guard: processes that ask are answered until it is dropped, which frees the name.
#[derive(Debug)]
pub(super) struct Answers(Arc<Answering>);

#[derive(Debug)]
struct Answering {
    runtime: RuntimeRef,
    /// Weak: the keeper has the only reference while no process is being answered.
    current: Weak<RwLock<Current>>,
    /// The number and the descriptor of the listener, as the poller watches it.
    number: u64,
    readable: OwnedFd,
    state: Mutex<AnswerState>,
}

#[derive(Debug)]
struct AnswerState {
    /// `None` after the keeper was dropped.
    listener: Option<Listener>,
    is_handed_over: bool,
    /// The time of the job that removes connections without a hello.
    expires: Option<Instant>,
}

impl Answers {
    pub(super) fn start(
        listener: Listener,
        current: Weak<RwLock<Current>>,
        runtime: RuntimeRef,
    ) -> Result<Self> {
        let readable = listener.as_fd().try_clone_to_owned();
        let readable =
            readable.map_err(|error| Error::io("duplicating the descriptor of a listener", error))?;
        let number = new_socket_number();
        let state = AnswerState { listener: Some(listener), is_handed_over: false, expires: None };
        let answering = Arc::new(Answering { runtime, current, number, readable, state: Mutex::new(state) });
        runtime.check()?.poller.watch_socket(number, Arc::clone(&answering) as _, 0)?;
        Ok(Self(answering))
    }

    /// Hands the socket over. When this returns, no process is being answered.
    pub(super) fn hand_over(&self, channel: &Channel) -> Result<()> {
        let mut state = self.0.lock()?;
        state.listener().hand_over(channel)?;
        state.is_handed_over = true;
        Ok(())
    }

    /// Answers again.
    pub(super) fn take_back(&self) -> Result<()> {
        let mut state = self.0.lock()?;
        state.listener().take_back()?;
        state.is_handed_over = false;
        self.0.watch(self.0.runtime.check()?);
        Ok(())
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        // In a forked child another thread may have held the lock.
        let Some(runtime) = self.0.runtime.here() else { return };
        // Before sockets are closed that the poller may be looking at.
        runtime.poller.unwatch_socket(self.0.number, self.0.readable.as_fd());
        let listener = self.0.state().listener.take();
        drop(listener);
    }
}

impl AnswerState {
    fn listener(&mut self) -> &mut Listener {
        self.listener.as_mut().expect("the guard exists")
    }
}

impl Answering {
    fn lock(&self) -> Result<MutexGuard<'_, AnswerState>> {
        self.runtime.check()?;
        Ok(self.state())
    }

    fn state(&self) -> MutexGuard<'_, AnswerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the poller report the next process that connects.
    fn watch(&self, runtime: &Runtime) {
        runtime.poller.arm_socket(self.number, self.readable.as_fd());
    }

    /// Answers the processes that have asked, on the worker's thread.
    fn answer(self: &Arc<Self>) {
        static WARNINGS: Throttle = Throttle::new();
        let Some(runtime) = self.runtime.here() else { return };
        let mut state = self.state();
        let AnswerState { listener: Some(listener), is_handed_over: false, .. } = &*state else { return };
        let mut answers = (0..MAX_ANSWERS).map(|_| self.answer_next(listener));
        let Some(Err(error)) = answers.find(|answered| !matches!(answered, Ok(true))) else {
            self.expire(&mut state, runtime);
            return self.watch(runtime);
        };
        if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: log::CHANNEL,
                keeper = listener.name(), %error, count, "a process that asked a keeper was not answered"
            );
        }
        self.run_at(runtime, clock::now() + PAUSE, |answering, runtime| answering.watch(runtime));
    }

    /// Removes the connections without a hello once their time has passed, whether or not others connect.
    fn expire(self: &Arc<Self>, state: &mut AnswerState, runtime: &Runtime) {
        if state.expires.is_none() {
            state.expires = state.listener.as_ref().and_then(Listener::next_expiry);
            if let Some(at) = state.expires {
                self.run_at(runtime, at, |answering, _| {
                    answering.state().expires = None;
                    answering.answer();
                });
            }
        }
    }

    /// Runs a job at this time, unless the keeper has been dropped by then.
    fn run_at(
        self: &Arc<Self>,
        runtime: &Runtime,
        at: Instant,
        job: impl FnOnce(&Arc<Self>, &Runtime) + Send + 'static,
    ) {
        let answering = Arc::downgrade(self);
        runtime.worker.submit_at(at, move || {
            if let Some(answering) = answering.upgrade()
                && let Some(runtime) = answering.runtime.here()
            {
                job(&answering, runtime);
            }
        });
    }

    /// Answers the next process if one has asked. Returns whether one has.
    fn answer_next(&self, listener: &Listener) -> Result<bool> {
        match listener.try_accept()? {
            Some(channel) => self.send(&channel).map(|()| true),
            None => Ok(false),
        }
    }

    /// Sends the export. The channel may be dropped after that: its grant is kept until the receiver has opened or discarded the
    /// export, or has terminated.
    fn send(&self, channel: &Channel) -> Result<()> {
        let Some(current) = self.current.upgrade() else { return Ok(()) };
        // Until the message is sent: `replace` returns the last reference of the keeper.
        let current = current.read().unwrap_or_else(PoisonError::into_inner);
        let Current { version, export } = &*current;
        let readers = export.holders().count(LeaseState::InUse) as u64;
        let announcement = postcard::to_stdvec(&Announcement { form: FORM, version: *version, readers });
        let bytes = announcement.map_err(|error| Error::Protocol(error.to_string()))?;
        // The first message of a channel does not wait.
        match channel.try_send(Message::new().bytes(bytes).export(&**export)).map_err(Error::from) {
            // The process has not waited for its answer.
            Err(error) if matches!(error.kind(), ErrorKind::Gone | ErrorKind::Closed) => Ok(()),
            sent => sent,
        }
    }
}

impl WatchedSocket for Answering {
    fn socket(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    fn awaits_data(&self) -> bool {
        true
    }

    fn ready(self: Arc<Self>) {
        if let Some(runtime) = self.runtime.here() {
            runtime.worker.submit(move || self.answer());
        }
    }
}
