//! Process-wide functions: counters, limits and shutdown.

#![allow(unsafe_code, reason = "closes memory that mappings still refer to")]

#[cfg(feature = "kill-points")]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::model::error::{Error, Result};
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::export::still_held;
use crate::sharing::import::CacheLimits;
use crate::sharing::staging::StagingLimits;
use crate::transport::Deadline;
#[cfg(feature = "kill-points")]
use crate::transport::wait_until_closed;
use crate::transport::{Counters, check_may_wait};

/// Returns counters of the library's activity in this process.
pub fn counters() -> Counters {
    let Ok(Some(runtime)) = running() else { return Counters::default() };
    let (counted, again) = (runtime.metrics.read(), runtime.imports.opens_again());
    let (opens_total, cache_hits_total) = (counted.opens_total + again, counted.cache_hits_total + again);
    let leases_idle = runtime.exports.idle_leases() as u64;
    let (imports_idle, imports_idle_bytes) = runtime.imports.idle();
    Counters { opens_total, cache_hits_total, leases_idle, imports_idle, imports_idle_bytes, ..counted }
}

/// Limits the import cache: how much imported memory stays open on idle leases.
///
/// Memory in the cache is opened again without a driver call. The least recently used idle lease is released first. When an
/// exporter waits for its memory or drops it, idle leases on it are released at once, regardless of the limits.
///
/// # Errors
///
/// [`Error::Io`] if the system cannot start a thread for the library; [`Error::Forked`].
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// use device_ipc_core::limits::CacheLimits;
///
/// device_ipc_core::limits::set_cache_limits(CacheLimits::default())?;
/// # Ok(())
/// # }
/// ```
pub fn set_cache_limits(limits: CacheLimits) -> Result<()> {
    let runtime = Runtime::get()?;
    runtime.worker.submit(move || runtime.imports.set_limits(limits));
    Ok(())
}

/// Limits staging: how much host memory copies to other processes may use, and the length of their chunks.
///
/// [`OpenBuilder::copy`](crate::OpenBuilder::copy) requests such copies. Copies in progress keep their limits.
///
/// # Errors
///
/// [`Error::Io`] if the system cannot start a thread for the library; [`Error::Forked`].
pub fn set_staging_limits(limits: StagingLimits) -> Result<()> {
    let runtime = Runtime::get()?;
    runtime.stagings.set_limits(runtime, limits);
    Ok(())
}

/// Releases all idle leases of this process, and waits until their memory is closed.
///
/// This includes memory that was released on a stream before the call, as soon as the stream reaches the release.
///
/// # Errors
///
/// [`Error::Timeout`] if a stream or the driver takes longer; the closing continues. [`Error::OnWorkerThread`] in a callback;
/// [`Error::Forked`].
pub fn close_unused(timeout: Duration) -> Result<()> {
    let Some(runtime) = running()? else { return Ok(()) };
    check_may_wait("close_unused", timeout)?;
    close_idle(runtime, Deadline::after(timeout))
}

/// Closes all memory of one exporter in this process, and returns the number of mappings that still referred to it.
///
/// After an exporter has died, this frees its memory: the driver keeps the memory while any process has it open. The mappings
/// return [`Error::ExporterGone`] from then on. The call waits until the work submitted to their devices has finished.
///
/// # Safety
///
/// No work that uses the memory is submitted after the call, through an address or view obtained before it.
///
/// # Errors
///
/// [`Error::Forked`].
pub unsafe fn close_mappings_of(exporter: &ProcessIdentity) -> Result<usize> {
    Ok(running()?.map_or(0, |runtime| runtime.imports.close_all_of(exporter)))
}

/// Ends all exports of this process, releases its idle leases, and waits until no other process holds a lease.
///
/// Exported memory does not outlive the process: call this before `main` returns if importers may still be reading.
///
/// # Errors
///
/// [`Error::StillHeld`] after the timeout, with the process, the program and the bytes of each holder; [`Error::Timeout`] if
/// only the driver did not finish in time; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
///
/// # Examples
///
/// ```
/// device_ipc_core::shutdown(std::time::Duration::from_secs(30))?;
/// # Ok::<(), device_ipc_core::Error>(())
/// ```
pub fn shutdown(timeout: Duration) -> Result<()> {
    let Some(runtime) = running()? else { return Ok(()) };
    check_may_wait("shutdown", timeout)?;
    let deadline = Deadline::after(timeout);
    runtime.exports.drop_all();
    runtime.worker.submit(|| runtime.imports.close_all_idle());
    let waited = runtime.exports.wait_all_retired(deadline.at);
    waited.map_err(|holders| still_held(timeout, holders))?;
    close_idle(runtime, deadline)
}

/// Waits until every queue of this process is empty: the worker's jobs, also those that wait for a stream, the poller's events and
/// commands, and descriptors that wait to be closed. Returns the number of jobs, events and commands since the first of them, without
/// those of this function; `None` after the timeout. Actions at a later time are no part of it.
///
/// For the project's own tests, which compare resources then. Where processes exchange messages, each of them is idle if two rounds
/// of calls return the same numbers.
#[cfg(feature = "kill-points")]
pub fn wait_until_idle(timeout: Duration) -> Option<u64> {
    /// The jobs of this function.
    static OWN_JOBS: AtomicU64 = AtomicU64::new(0);
    let Ok(Some(runtime)) = running() else { return Some(0) };
    let deadline = Deadline::after(timeout);
    let mut before = None;
    loop {
        OWN_JOBS.fetch_add(1, Ordering::SeqCst);
        let is_worker_idle = runtime.worker.run_behind(|| {}, deadline.left());
        let handled = runtime.poller.wait_until_idle(deadline.left())?;
        if !is_worker_idle || !wait_until_closed(deadline.left()) {
            return None;
        }
        let done = handled + runtime.metrics.jobs_total.get() - OWN_JOBS.load(Ordering::SeqCst);
        if before.replace(done) == Some(done) {
            return Some(done);
        }
    }
}

/// Returns the runtime, if this process has used the library.
fn running() -> Result<Option<&'static Runtime>> {
    match Runtime::existing() {
        Some(runtime) => Ok(Some(runtime)),
        // The library is unused, or only the process that this one was forked from has used it.
        None if Runtime::is_the_parents() => Err(Error::Forked),
        None => Ok(None),
    }
}

fn close_idle(runtime: &'static Runtime, deadline: Deadline) -> Result<()> {
    if runtime.worker.run_behind(|| runtime.imports.close_all_idle(), deadline.left()) {
        return Ok(());
    }
    Err(deadline.passed("the closing of memory by the driver", "; a stream may still be using it"))
}
