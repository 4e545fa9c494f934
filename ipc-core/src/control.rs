//! What concerns the whole process: numbers, limits, and coming to an end.

#![allow(unsafe_code, reason = "closes memory that mappings still name")]

use std::time::Duration;

use crate::model::error::{Error, Result};
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::export::still_held;
use crate::sharing::import::CacheLimits;
use crate::sharing::staging::StagingLimits;
use crate::transport::Deadline;
use crate::transport::{Counters, check_may_wait};

/// What the library has done so far in this process.
pub fn counters() -> Counters {
    let Some(runtime) = Runtime::existing() else { return Counters::default() };
    let (counted, again) = (runtime.metrics.read(), runtime.imports.opens_again());
    let (opens_total, cache_hits_total) = (counted.opens_total + again, counted.cache_hits_total + again);
    Counters { opens_total, cache_hits_total, ..counted }
}

/// How much memory of others stays open while nobody uses it, so that it can be opened again at no cost. The longest
/// unused is closed first. An exporter that waits for its memory, or drops it, gets it back at once whatever the limits.
///
/// # Errors
///
/// [`Error::Io`] where the system starts no thread for the library; [`Error::Forked`].
pub fn set_cache_limits(limits: CacheLimits) -> Result<()> {
    let runtime = Runtime::get()?;
    runtime.worker.submit(move || runtime.imports.set_limits(limits));
    Ok(())
}

/// How much host memory copies to other processes may take ([`OpenBuilder::or_staged`](crate::OpenBuilder::or_staged)), and
/// how long their chunks are. Those that have begun go on as they are.
///
/// # Errors
///
/// [`Error::Io`] where the system starts no thread for the library; [`Error::Forked`].
pub fn set_staging_limits(limits: StagingLimits) -> Result<()> {
    Runtime::get()?.stagings.set_limits(limits);
    Ok(())
}

/// Closes all memory of others that nobody uses, and returns when that has been done: also what was released on streams
/// before, once they have got there.
///
/// # Errors
///
/// [`Error::Timeout`] where a stream or the driver takes longer; it goes on. [`Error::OnWorkerThread`] in a callback;
/// [`Error::Forked`].
pub fn close_unused(timeout: Duration) -> Result<()> {
    let Some(runtime) = running()? else { return Ok(()) };
    check_may_wait("close_unused", timeout)?;
    closed(runtime, Deadline::after(timeout))
}

/// Closes everything of one exporter that is open here, also what mappings still name, and returns how many of these
/// there were. After an exporter has died this is what brings its memory back: the driver keeps it while anybody has it
/// open. The mappings give [`Error::ExporterGone`] from then on.
///
/// Waits until work that was submitted to their devices has finished.
///
/// # Safety
///
/// No work that uses the memory is submitted afterwards, by an address or a view that was taken before.
///
/// # Errors
///
/// [`Error::Forked`].
pub unsafe fn close_mappings_of(exporter: &ProcessIdentity) -> Result<usize> {
    Ok(running()?.map_or(0, |runtime| runtime.imports.close_all_of(exporter)))
}

/// Ends all exports of this process, gives back what it has open of others and does not use, and waits until no other
/// process holds anything. No promise outlives the process: call this before `main` returns where others may still be
/// reading.
///
/// # Errors
///
/// [`Error::StillHeld`] when the time is over, with the process, the program and the bytes of each holder;
/// [`Error::Timeout`] where only the driver was not done in time; [`Error::OnWorkerThread`] in a callback;
/// [`Error::Forked`].
pub fn shutdown(timeout: Duration) -> Result<()> {
    let Some(runtime) = running()? else { return Ok(()) };
    check_may_wait("shutdown", timeout)?;
    let deadline = Deadline::after(timeout);
    runtime.exports.drop_all();
    runtime.worker.submit(|| runtime.imports.close_all_idle());
    let waited = runtime.exports.wait_all_retired(deadline.at);
    waited.map_err(|holders| still_held(timeout, holders))?;
    closed(runtime, deadline)
}

fn running() -> Result<Option<&'static Runtime>> {
    match Runtime::existing() {
        Some(runtime) => Ok(Some(runtime)),
        // Nothing was ever done; or it was, in the process that this one was forked from.
        None if Runtime::is_the_parents() => Err(Error::Forked),
        None => Ok(None),
    }
}

fn closed(runtime: &'static Runtime, deadline: Deadline) -> Result<()> {
    if runtime.worker.run_behind(|| runtime.imports.close_all_idle(), deadline.left()) {
        return Ok(());
    }
    Err(deadline.passed("the closing of memory by the driver", "; a stream may still be using it"))
}
