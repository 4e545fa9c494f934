//! The clock of this crate: every time that it reads, and every wait with a limit, so that tests need not wait.
//!
//! With the feature `test-clock` a test can advance the clock of its process ([`TestClock`]). Without it the functions are those
//! of the standard library and of the kernel. `clippy.toml` forbids the latter elsewhere in this crate.

#![allow(clippy::disallowed_methods, reason = "the other modules use this one")]

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

#[cfg(any(test, feature = "test-clock"))]
pub use advanced::TestClock;
pub(crate) use advanced::to_system;
use advanced::{advanced, is_taken};
pub use interrupt::interruptible;

mod interrupt;

/// Returns the time.
pub(crate) fn now() -> Instant {
    advanced(Instant::now())
}

/// Returns the time that has passed since `begin`; in an interrupted call, more than any limit.
pub(crate) fn elapsed(begin: Instant) -> Duration {
    if interrupt::is_interrupted() { Duration::MAX } else { now().saturating_duration_since(begin) }
}

/// Returns the time that is left until `end`; in an interrupted call, none.
pub(crate) fn left(end: Instant) -> Duration {
    if interrupt::is_interrupted() { Duration::ZERO } else { end.saturating_duration_since(now()) }
}

/// Returns the time for which the kernel may suspend a thread that waits for `left` at most. The thread then determines again
/// what is left.
pub(crate) fn slice(left: Duration) -> Duration {
    interrupt::slice(advanced::slice(left))
}

/// Returns whether the next [`slice`] of this thread checks for an interruption.
pub(crate) fn is_check_due() -> bool {
    interrupt::is_check_due()
}

/// Returns whether waits have to be sliced.
fn is_sliced() -> bool {
    is_taken() || interrupt::is_interruptible()
}

/// Suspends this thread.
pub(crate) fn sleep(time: Duration) {
    if !is_sliced() {
        return thread::sleep(time);
    }
    let end = now() + time;
    let mut left = time;
    while !left.is_zero() {
        thread::sleep(slice(left));
        left = self::left(end);
    }
}

/// Waits for events of descriptors. Returns false where the time `end` came first; `None` is no limit.
pub(crate) fn poll(files: &mut [PollFd<'_>], end: impl Into<Option<Instant>>) -> rustix::io::Result<bool> {
    let end = end.into();
    let mut left = end.map(self::left);
    loop {
        let found = rustix::event::poll(files, left.map(|left| timespec(slice(left))).as_ref());
        if !matches!(found, Ok(0) | Err(Errno::INTR)) {
            return found.map(|_| true);
        }
        left = end.map(self::left);
        if found.is_ok() && left == Some(Duration::ZERO) {
            return Ok(false);
        }
    }
}

/// Waits for a message, no longer than `time`.
pub(crate) fn receive<T>(messages: &Receiver<T>, time: Duration) -> Result<T, RecvTimeoutError> {
    if !is_sliced() {
        return messages.recv_timeout(time);
    }
    let begin = now();
    let mut left = time;
    loop {
        match messages.recv_timeout(slice(left)) {
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => left = time.saturating_sub(elapsed(begin)),
            received => return received,
        }
    }
}

/// Converts a duration for the kernel; a longer one is rounded down to the maximum.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::from(i32::MAX), tv_nsec: 0 })
}

#[cfg(not(any(test, feature = "test-clock")))]
mod advanced {
    use std::time::{Duration, Instant};

    pub(super) const fn advanced(system: Instant) -> Instant {
        system
    }

    /// Returns a time of this clock as one of the system's, for code outside of this crate.
    pub(crate) const fn to_system(at: Instant) -> Instant {
        at
    }

    pub(super) const fn is_taken() -> bool {
        false
    }

    pub(super) const fn slice(left: Duration) -> Duration {
        left
    }
}

#[cfg(any(test, feature = "test-clock"))]
mod advanced {
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Mutex, PoisonError};
    use std::time::{Duration, Instant};

    /// The interval at which waits notice an advance.
    const SLICE: Duration = Duration::from_millis(1);

    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    /// The difference to the system's clock, in ns.
    static AHEAD: AtomicU64 = AtomicU64::new(0);
    /// The wait that is to be skipped, by the time that is left.
    static SKIPPED: Mutex<Option<Range<Duration>>> = Mutex::new(None);

    /// The clock of this process in the hands of a test. Only for processes that no other test shares.
    ///
    /// Waits that have begun before [`take`](Self::take) do not notice advances.
    #[derive(Debug)]
    pub struct TestClock(());

    impl TestClock {
        /// Takes the clock. It stays the system's clock until the first advance.
        pub fn take() -> Self {
            IS_TAKEN.store(true, Ordering::SeqCst);
            Self(())
        }

        /// Advances the clock.
        pub fn advance(&self, by: Duration) {
            AHEAD.fetch_add(nanoseconds(by), Ordering::SeqCst);
        }

        /// Lets a wait of any thread pass at once, by advancing the clock to its end: the first one, from now on, for which a time
        /// in this range is left.
        pub fn skip_wait(&self, left: Range<Duration>) {
            *SKIPPED.lock().unwrap_or_else(PoisonError::into_inner) = Some(left);
        }
    }

    pub(super) fn advanced(system: Instant) -> Instant {
        system + ahead()
    }

    pub(crate) fn to_system(at: Instant) -> Instant {
        at.checked_sub(ahead()).unwrap_or(at)
    }

    pub(super) fn is_taken() -> bool {
        IS_TAKEN.load(Ordering::Relaxed)
    }

    pub(super) fn slice(left: Duration) -> Duration {
        if !is_taken() {
            return left;
        }
        let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
        if skipped.take_if(|range| range.contains(&left)).is_some() {
            AHEAD.fetch_add(nanoseconds(left), Ordering::SeqCst);
            return Duration::ZERO;
        }
        left.min(SLICE)
    }

    fn ahead() -> Duration {
        Duration::from_nanos(AHEAD.load(Ordering::Relaxed))
    }

    fn nanoseconds(time: Duration) -> u64 {
        time.as_nanos().try_into().unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;
