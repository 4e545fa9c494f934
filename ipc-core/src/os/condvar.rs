//! A condition variable that costs nothing where nobody waits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar as Std, LockResult, MutexGuard, WaitTimeoutResult};
use std::time::Duration;

/// As the standard library's, which makes a system call at every notice. This one makes it where somebody waits.
///
/// Whoever notifies has changed what is waited for under the mutex that the waiting thread uses: then the count of those
/// who wait cannot be missed.
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

    /// Called with the mutex held.
    fn counted<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let woken = wait();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        woken
    }
}
