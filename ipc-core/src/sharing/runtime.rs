//! The process-wide state: identity, the two threads, the table of exports and the table of imports.
//!
//! The first export, or the first open of another process's memory, creates the state. It has at most two threads. The *worker*
//! runs everything that may block; it starts with the state, so that a drop always finds it. The *poller*
//! ([`crate::transport`]) never calls a driver, runs user code or blocks on a send; it starts when it is first needed. If the
//! system cannot start a thread, the export or the open fails.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::model::error::{Error, Result};
use crate::os::process::{Owner, ProcessIdentity};
use crate::os::{Readiness, at_exit, clock, spawn_without_signals};
use crate::sharing::broker::Broker;
use crate::sharing::export::ExportTable;
use crate::sharing::import::ImportTable;
use crate::sharing::remote::IdleConnections;
use crate::sharing::staging::Stagings;
use crate::transport::{Deadline, Metrics, Poller, Worker};

/// The storage of the state. [`COMPLETE`] refers to it.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// The state once its tables know it.
static COMPLETE: OnceLock<&Runtime> = OnceLock::new();

/// Time for which an orderly exit waits for device work on imported memory.
const EXIT_LIMIT: Duration = Duration::from_secs(10);

/// Time for the reports to the exporters.
const REPORT_LIMIT: Duration = Duration::from_millis(500);

/// Waits for device work on imported memory, and then reports to the exporters that this process exits in order, so that they take
/// the end of its leases for a release and not for a death. On a thread of its own: this thread's `thread_local!` values have been
/// destroyed, and the user's log uses them; and a lock of a thread that has ended must not keep the process.
extern "C" fn exit_in_order() {
    // A forked child has the parent's registration, and no connection of its own.
    let Some(runtime) = Runtime::existing().filter(|runtime| runtime.imports.has_links()) else { return };
    let (done, finished) = channel();
    let finish = move || {
        if runtime.imports.finish_device_work(EXIT_LIMIT) {
            runtime.imports.announce_exit(Deadline::after(REPORT_LIMIT));
        }
        let _ = done.send(());
    };
    if spawn_without_signals("device-ipc-exit", finish).is_ok() {
        let _ = clock::receive(&finished, EXIT_LIMIT + 2 * REPORT_LIMIT);
    }
}

/// The process-wide state.
#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) owner: Owner,
    pub(crate) identity: ProcessIdentity,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) worker: Worker,
    pub(crate) poller: Poller<Broker>,
    pub(crate) exports: ExportTable,
    pub(crate) imports: ImportTable,
    pub(crate) stagings: Stagings,
    /// The connections to exporters of other hosts without a lease.
    pub(crate) idle_connections: IdleConnections,
    /// Always readable. Replaces a descriptor that could not be created, so that its user polls instead of waiting for ever.
    always_ready: Readiness,
}

impl Runtime {
    /// Returns the state of this process, which the first call creates.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`](crate::Error::Forked) in a forked child of the process with the state; [`Error::Io`](crate::Error::Io)
    /// if the system cannot start a thread.
    #[inline]
    pub(crate) fn get() -> Result<&'static Self> {
        let Some(&runtime) = COMPLETE.get() else { return Self::create() };
        runtime.owner.check()?;
        Ok(runtime)
    }

    #[cold]
    fn create() -> Result<&'static Self> {
        let metrics = Arc::<Metrics>::default();
        let (identity, worker) = (ProcessIdentity::current()?, Worker::start(Arc::clone(&metrics))?);
        let always_ready = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
        always_ready.set();
        let made = Self {
            owner: Owner::current(),
            identity,
            poller: Poller::new(worker.clone(), Arc::clone(&metrics), Broker::of_process),
            metrics,
            worker,
            exports: ExportTable::default(),
            imports: ImportTable::default(),
            stagings: Stagings::default(),
            idle_connections: IdleConnections::default(),
            always_ready,
        };
        // If two threads reach this point, one state is kept; the worker of the other one ends with its drop.
        let runtime = RUNTIME.get_or_init(|| {
            at_exit(exit_in_order);
            made
        });
        // Before another thread can get it.
        runtime.exports.home.set(runtime);
        Ok(COMPLETE.get_or_init(|| runtime))
    }

    /// Returns the state for a guard to keep.
    pub(crate) const fn for_guard(&'static self) -> RuntimeRef {
        RuntimeRef(self)
    }

    /// Returns the state, if this process has created it.
    pub(crate) fn existing() -> Option<&'static Self> {
        COMPLETE.get().copied().filter(|runtime| runtime.owner.is_here())
    }

    /// Returns whether the state belongs to the process that this one was forked from.
    pub(crate) fn is_the_parents() -> bool {
        COMPLETE.get().is_some_and(|runtime| !runtime.owner.is_here())
    }
}

/// The state of the process that a guard belongs to. In a forked child, where guards do nothing, it gives no access to the state.
#[derive(Clone, Copy)]
pub(crate) struct RuntimeRef(&'static Runtime);

impl RuntimeRef {
    /// Returns the state, unless this is a forked child.
    pub(crate) fn here(self) -> Option<&'static Runtime> {
        self.is_here().then_some(self.0)
    }

    /// Returns the state, or [`Error::Forked`](crate::Error::Forked) in a forked child.
    pub(crate) fn check(self) -> Result<&'static Runtime> {
        self.0.owner.check().map(|()| self.0)
    }

    /// Returns whether this process is the one that the guard belongs to.
    pub(crate) fn is_here(self) -> bool {
        self.0.owner.is_here()
    }

    /// Returns a descriptor that is always readable, also in a forked child.
    pub(crate) fn always_ready(self) -> BorrowedFd<'static> {
        self.0.always_ready.as_fd()
    }
}

/// The state that a table is part of, for the methods of the table; nothing in a unit test of a table alone.
#[derive(Debug, Default)]
pub(crate) struct Home(OnceLock<RuntimeRef>);

impl Home {
    fn set(&self, runtime: &'static Runtime) {
        self.0.get_or_init(|| runtime.for_guard());
    }

    /// Returns the state, unless this is a forked child.
    pub(crate) fn here(&self) -> Option<&'static Runtime> {
        self.0.get().and_then(|runtime| runtime.here())
    }

    /// Counts an event.
    pub(crate) fn count(&self, count: impl FnOnce(&Metrics)) {
        if let Some(runtime) = self.here() {
            count(&runtime.metrics);
        }
    }
}

impl fmt::Debug for RuntimeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.owner.fmt(f)
    }
}
