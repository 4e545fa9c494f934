//! Gates in streams: what happens while a stream does not continue.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device_ipc_core::{Error, Result, Stream, backend};

use crate::check::that;
use crate::outcome::{Outcome, Stop, skip};

/// The time after which a gate opens by itself, so that a call that waits for the stream returns, and the case fails.
const LIMIT: Duration = Duration::from_secs(20);

/// The time after which a gate opens for a call that waits for the stream.
const MOMENT: Duration = Duration::from_millis(50);

const CLOSED: u8 = 0;
const OPENED: u8 = 1;
const EXPIRED: u8 = 2;

/// A point that a stream does not pass before the case opens it. Dropping it opens it.
#[derive(Debug)]
pub struct Gate {
    shared: Arc<Shared>,
    /// Requests the opening in a moment.
    soon: Sender<()>,
    watcher: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    gate: backend::Gate,
    state: AtomicU8,
}

impl Shared {
    fn open(&self, state: u8) {
        if self.state.compare_exchange(CLOSED, state, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.gate.open();
        }
    }
}

impl Gate {
    /// Closes a gate in a stream, behind the work that was submitted before.
    ///
    /// # Errors
    ///
    /// [`Stop::Skipped`] where the device has no gates.
    pub fn close(stream: &Stream) -> std::result::Result<Self, Stop> {
        match Self::try_close(stream) {
            Err(Error::Unsupported { why, .. }) => skip(format!("the stream cannot be blocked: {why}")),
            closed => Ok(closed?),
        }
    }

    /// As [`close`](Self::close), with the library's error.
    pub(crate) fn try_close(stream: &Stream) -> Result<Self> {
        let shared = Arc::new(Shared { gate: stream.gate()?, state: AtomicU8::new(CLOSED) });
        let (soon, requests) = channel();
        let watched = Arc::clone(&shared);
        let watch = move || match requests.recv_timeout(LIMIT) {
            Ok(()) => {
                thread::sleep(MOMENT);
                watched.open(OPENED);
            }
            Err(RecvTimeoutError::Timeout) => watched.open(EXPIRED),
            Err(RecvTimeoutError::Disconnected) => {}
        };
        // A census of the process does not count threads of this name.
        let watcher = thread::Builder::new().name("test-gate".into()).spawn(watch);
        Ok(Self { shared, soon, watcher: watcher.map_err(|error| Error::io("starting a thread", error))? })
    }

    /// Opens the gate. `what` has happened since it was closed.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where the gate opened by itself, as something waited for the stream.
    #[track_caller]
    pub fn open(self, what: &str) -> Outcome {
        that(self.open_in_time(), format!("{what} should not wait for the stream"))
    }

    /// Opens the gate, and waits until its thread has exited. Returns false if it had opened by itself.
    pub(crate) fn open_in_time(self) -> bool {
        let Self { shared, soon, watcher } = self;
        shared.open(OPENED);
        drop(soon);
        watcher.join().expect("it does not panic");
        shared.state.load(Ordering::SeqCst) == OPENED
    }

    /// Returns whether the gate is open.
    pub fn is_open(&self) -> bool {
        self.shared.state.load(Ordering::SeqCst) != CLOSED
    }

    /// Opens the gate in a moment, for a call that waits for the stream.
    pub fn open_soon(&self) {
        // The thread has exited if the gate has opened by itself.
        let _ = self.soon.send(());
    }

    /// Holds where the gate is open: `what` has returned, which waits for the stream.
    ///
    /// # Errors
    ///
    /// [`Stop::Failed`] where it is closed.
    #[track_caller]
    pub fn was_passed(&self, what: &str) -> Outcome {
        that(self.is_open(), format!("{what} should wait for the stream, and did not"))
    }
}
