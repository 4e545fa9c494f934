//! What a process has once: its identity, the two threads, the table of exports and the table of imports.
//!
//! Nothing of it exists before the first export or the first open of another process's memory; the threads start
//! when they are first needed. At most two: the *poller* ([`crate::broker`]), which never calls a driver, runs user
//! code or blocks on a send, and the *worker*, which does what may block.

mod condvar;
mod fork;
mod metrics;
mod pace;
mod thread;
mod worker;

use std::sync::OnceLock;

pub use metrics::Counters;

pub(crate) use condvar::Condvar;
pub(crate) use fork::{ClosedByFork, generation};
pub(crate) use metrics::Metrics;
pub(crate) use pace::{Look, Pace, SPIN};
pub(crate) use thread::spawn_without_signals;
pub(crate) use worker::Worker;

use crate::broker::Poller;
use crate::error::Result;
use crate::export::ExportTable;
use crate::import::ImportTable;
use crate::process::{Owner, ProcessIdentity};
use crate::staging::Stagings;

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// The process-wide state.
#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) owner: Owner,
    pub(crate) identity: ProcessIdentity,
    pub(crate) metrics: Metrics,
    pub(crate) worker: Worker,
    pub(crate) poller: Poller,
    pub(crate) exports: ExportTable,
    pub(crate) imports: ImportTable,
    pub(crate) stagings: Stagings,
}

impl Runtime {
    /// The state of this process.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`](crate::Error::Forked) in a forked child of the process that made it.
    pub(crate) fn get() -> Result<&'static Self> {
        if let Some(runtime) = RUNTIME.get() {
            runtime.owner.check()?;
            return Ok(runtime);
        }
        let identity = ProcessIdentity::current()?;
        Ok(RUNTIME.get_or_init(|| Self {
            owner: Owner::current(),
            identity,
            metrics: Metrics::default(),
            worker: Worker::default(),
            poller: Poller::default(),
            exports: ExportTable::default(),
            imports: ImportTable::default(),
            stagings: Stagings::default(),
        }))
    }

    /// The state, where this process has any.
    pub(crate) fn existing() -> Option<&'static Self> {
        RUNTIME.get().filter(|runtime| runtime.owner.is_here())
    }

    /// Is there state that belongs to the process that this one was forked from?
    pub(crate) fn is_the_parents() -> bool {
        RUNTIME.get().is_some_and(|runtime| !runtime.owner.is_here())
    }

    /// The state, from a guard that holds something of it. `None` in a forked child, where guards do nothing.
    pub(crate) fn of_guard(owner: &Owner) -> Option<&'static Self> {
        if owner.is_here() { Self::get().ok() } else { None }
    }
}
