//! A condition variable that makes no system call when no thread waits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar as Std, LockResult, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::clock;

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

    /// Waits for a notification, no longer than `timeout`. May return earlier. The guard is that of the mutex.
    #[allow(clippy::disallowed_methods, reason = "the clock determines the duration")]
    pub(crate) fn wait_timeout<'a, T>(
        &self,
        mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> MutexGuard<'a, T> {
        if clock::is_check_due() {
            // The check may wait for a lock of the caller, such as that of Python's interpreter, whose owner waits for this mutex.
            drop(guard);
            clock::slice(timeout);
            return mutex.lock().unwrap_or_else(PoisonError::into_inner);
        }
        let waited = self.counted(|| self.inner.wait_timeout(guard, clock::slice(timeout)));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits while `condition` is true, no longer than `timeout`. The guard is that of the mutex.
    pub(crate) fn wait_timeout_while<'a, T>(
        &self,
        mutex: &'a Mutex<T>,
        mut guard: MutexGuard<'a, T>,
        timeout: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let begin = clock::now();
        while condition(&mut guard) {
            let left = timeout.saturating_sub(clock::elapsed(begin));
            if left.is_zero() {
                break;
            }
            guard = self.wait_timeout(mutex, guard, left);
        }
        guard
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

    /// Returns whether a thread waits.
    #[cfg(test)]
    pub(crate) fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Runs `wait` with this thread counted as waiting. The caller holds the mutex.
    fn counted<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let woken = wait();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        woken
    }
}
