//! A condition variable that makes no system call when no thread waits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar as Std, LockResult, MutexGuard, WaitTimeoutResult};
use std::time::Duration;

/// A condition variable whose notifications make a system call only if a thread waits.
///
/// The standard library's makes one for every notification. The notifying thread must change the condition under the mutex of
/// the waiting threads; then it cannot miss a waiting thread in the count.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    inner: Std,
    waiting: AtomicUsize,
}

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self { inner: Std::new(), waiting: AtomicUsize::new(0) }
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.counted(|| self.inner.wait(guard))
    }

    pub(crate) fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        self.counted(|| self.inner.wait_timeout(guard, timeout))
    }

    pub(crate) fn notify_one(&self) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.inner.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.inner.notify_all();
        }
    }

    /// Runs `wait` with this thread counted as waiting. The caller holds the mutex.
    fn counted<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let woken = wait();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        woken
    }
}
