//! Threads that use one ring or one reader.
//!
//! A ring has one slot for writing at a time. A thread that asks for it while another one writes waits for its turn; the thread
//! that has it would wait for itself, and gets an error. A reader gives out several slots; they return to the writer in their
//! order, so one thread can hold up the others: they wait for it as long as not all slots are their own.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use device_ipc::{Error, Result};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::reader::ReaderInner;
use super::{RingInner, lock};
use crate::wait;

/// The turn to write a ring.
#[derive(Default)]
pub(super) struct Turn {
    writer: Mutex<Option<Writer>>,
    ended: Condvar,
    last: AtomicU64,
    /// The identity of the Python object for which tasks wait; 0 for none.
    tasks: AtomicUsize,
}

/// The thread that writes, and the number of its turn.
type Writer = (ThreadId, u64);

/// The right to write the next slot of a ring, until it is dropped.
pub(super) struct Writing {
    pub(super) inner: Arc<RingInner>,
}

impl Writing {
    /// Waits for the turn of this thread. A time limit of zero fails if any thread, also this one, writes a slot.
    pub(super) fn begin(
        py: Python<'_>,
        inner: &Arc<RingInner>,
        object: usize,
        limit: Duration,
    ) -> PyResult<Self> {
        let is_own = lock(&inner.turn.writer).is_some_and(|(writer, _)| writer == thread::current().id());
        if !limit.is_zero() && is_own {
            return Err(PyValueError::new_err(
                "this thread is writing a slot of the ring already; publish or drop it first",
            ));
        }
        if limit.is_zero() {
            wait::wait(py, limit, |slice| inner.turn.take(object, slice))?;
        } else {
            wait::unless(py, limit, "ring", &inner.closed, |slice| inner.turn.take(object, slice))?;
        }
        Ok(Self { inner: Arc::clone(inner) })
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        let turn = &self.inner.turn;
        *lock(&turn.writer) = None;
        turn.ended.notify_one();
        let object = turn.tasks.swap(0, Ordering::AcqRel);
        if object != 0 {
            let _ = Python::try_attach(|py| wait::wake_tasks_of(py, object));
        }
    }
}

impl Turn {
    /// Returns the number of the turn that is in progress, if any.
    pub(super) fn number(&self) -> Option<u64> {
        lock(&self.writer).map(|(_, number)| number)
    }

    fn take(&self, object: usize, limit: Duration) -> Result<()> {
        let writer = lock(&self.writer);
        let waiting = self.ended.wait_timeout_while(writer, limit, |writer| writer.is_some());
        let (mut writer, _) = waiting.unwrap_or_else(PoisonError::into_inner);
        if writer.is_some() {
            if limit.is_zero() {
                self.tasks.store(object, Ordering::Release);
            }
            let what = "the slot of the ring that is being written; publish or drop it".to_owned();
            return Err(Error::Timeout { what, after: limit, detail: String::new() });
        }
        *writer = Some((thread::current().id(), self.last.fetch_add(1, Ordering::Relaxed)));
        Ok(())
    }
}

/// The number of slots of a reader that each thread has taken and not released.
#[derive(Default)]
pub(super) struct Held {
    by_thread: Mutex<HashMap<ThreadId, usize>>,
    released: Condvar,
}

/// A slot that a thread has taken, until it is dropped.
pub(super) struct HeldSlot {
    reader: Arc<ReaderInner>,
    thread: ThreadId,
}

impl HeldSlot {
    pub(super) fn of(reader: &Arc<ReaderInner>) -> Self {
        let thread = thread::current().id();
        *lock(&reader.held.by_thread).entry(thread).or_default() += 1;
        Self { reader: Arc::clone(reader), thread }
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        let held = &self.reader.held;
        let mut by_thread = lock(&held.by_thread);
        if let Some(count) = by_thread.get_mut(&self.thread) {
            *count -= 1;
            if *count == 0 {
                by_thread.remove(&self.thread);
            }
        }
        held.released.notify_all();
    }
}

impl Held {
    /// Replaces the error that all slots are held by one of the time limit, if other threads hold some of them: waits until one
    /// of them is released.
    pub(super) fn wait_for_others<T>(&self, taken: Result<T>, limit: Duration) -> Result<T> {
        let Err(Error::RingSlotsHeld { .. }) = &taken else { return taken };
        let this = thread::current().id();
        let by_thread = lock(&self.by_thread);
        let before: usize = by_thread.values().sum();
        let own = by_thread.get(&this).copied().unwrap_or_default();
        if before == own && own > 0 {
            return taken;
        }
        let is_held =
            |now: &mut HashMap<ThreadId, usize>| now.values().sum::<usize>() >= before && before > 0;
        drop(self.released.wait_timeout_while(by_thread, limit, is_held));
        let what = "the release of a slot by another thread".to_owned();
        Err(Error::Timeout { what, after: limit, detail: String::new() })
    }
}
