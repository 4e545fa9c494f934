//! A mutex whose lock can be waited for until a deadline.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Deadline;
use crate::os::Condvar;

/// A mutex whose lock can be waited for until a deadline.
#[derive(Debug)]
pub(crate) struct TimedMutex<T> {
    /// `None` while it is locked.
    inside: Mutex<Option<T>>,
    free: Condvar,
}

impl<T> TimedMutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { inside: Mutex::new(Some(value)), free: Condvar::new() }
    }

    /// Locks it. `None` where another thread still holds the lock at the deadline.
    pub(crate) fn lock(&self, deadline: Deadline) -> Option<TimedGuard<'_, T>> {
        let mut inside = self.inside();
        loop {
            if let Some(value) = inside.take() {
                return Some(TimedGuard { mutex: self, value: Some(value) });
            }
            let left = deadline.left();
            if left.is_zero() {
                return None;
            }
            inside = self.free.wait_timeout(&self.inside, inside, left);
        }
    }

    /// Locks it, unless another thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<TimedGuard<'_, T>> {
        let value = self.inside().take()?;
        Some(TimedGuard { mutex: self, value: Some(value) })
    }

    fn inside(&self) -> MutexGuard<'_, Option<T>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lock of a [`TimedMutex`], until it is dropped.
#[derive(Debug)]
pub(crate) struct TimedGuard<'a, T> {
    mutex: &'a TimedMutex<T>,
    value: Option<T>,
}

impl<T> Deref for TimedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("returned by drop alone")
    }
}

impl<T> DerefMut for TimedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("returned by drop alone")
    }
}

impl<T> Drop for TimedGuard<'_, T> {
    fn drop(&mut self) {
        *self.mutex.inside() = self.value.take();
        self.mutex.free.notify_one();
    }
}

#[cfg(test)]
mod tests;
