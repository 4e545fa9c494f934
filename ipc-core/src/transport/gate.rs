//! A thing that one thread has at a time, and that others wait for no longer than they said.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Deadline;
use crate::os::Condvar;

/// As a mutex, whose lock can be waited for until a deadline.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    /// `None` while some thread has it.
    inside: Mutex<Option<T>>,
    free: Condvar,
}

impl<T> Gate<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { inside: Mutex::new(Some(value)), free: Condvar::new() }
    }

    /// Takes the thing, or `None` where another thread still has it at the deadline.
    pub(crate) fn enter(&self, deadline: Deadline) -> Option<Turn<'_, T>> {
        let mut inside = self.lock();
        loop {
            if let Some(value) = inside.take() {
                return Some(Turn { gate: self, value: Some(value) });
            }
            let left = deadline.left();
            if left.is_zero() {
                return None;
            }
            inside = self.free.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the thing if nobody has it.
    pub(crate) fn try_enter(&self) -> Option<Turn<'_, T>> {
        let value = self.lock().take()?;
        Some(Turn { gate: self, value: Some(value) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thing, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a, T> {
    gate: &'a Gate<T>,
    value: Option<T>,
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("given back by drop alone")
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("given back by drop alone")
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        *self.gate.lock() = self.value.take();
        self.gate.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_turn_is_waited_for_until_the_deadline_and_given_back() {
        let gate = Gate::new(1);
        let mut turn = gate.try_enter().unwrap();
        assert!(gate.try_enter().is_none());
        assert!(gate.enter(Deadline::after(Duration::from_millis(1))).is_none());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| *gate.enter(Deadline::after(Duration::from_secs(10))).unwrap());
            *turn = 2;
            drop(turn);
            assert_eq!(other.join().unwrap(), 2);
        });
    }
}
