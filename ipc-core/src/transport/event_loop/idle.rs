//! The moment at which the poller has nothing left to handle, for tests.

use std::sync::mpsc::Sender;

use rustix::event::epoll::Event;

use super::{EventLoop, Timer};
use crate::transport::service::Service;
use crate::transport::watch::WAKE;

/// The threads that wait until the poller is idle.
#[derive(Default)]
pub(super) struct Idle {
    waiting: Vec<Sender<u64>>,
    /// The number of events and commands handled, without those of the waiting threads.
    handled: u64,
}

impl Idle {
    pub(super) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn note_command(&mut self) {
        self.handled += 1;
    }

    pub(super) fn await_by(&mut self, answer: Sender<u64>) {
        self.waiting.push(answer);
        // The command is none of the library.
        self.handled -= 1;
    }
}

impl<S: Service> EventLoop<S> {
    /// Counts the events of a turn. A turn without events is idle, unless a connection is read again later.
    pub(super) fn note_turn(&mut self, events: &[Event]) {
        self.idle.handled += events.iter().filter(|event| event.data.u64() != WAKE).count() as u64;
        let is_paused = || self.timers.values().any(|timer| matches!(timer, (_, Timer::Resume)));
        if events.is_empty() && self.idle.is_awaited() && !is_paused() {
            for answer in self.idle.waiting.drain(..) {
                // The receiver is dropped after the timeout.
                let _ = answer.send(self.idle.handled);
            }
        }
    }
}
