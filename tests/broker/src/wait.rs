//! Waiting, never for ever.

use std::time::{Duration, Instant};

use crate::{Census, Child};

/// How long anything may take that takes milliseconds. Long, because CI shares its machine.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// The interval at which `/proc` is polled, which reports no changes.
const LOOK: Duration = Duration::from_millis(2);

/// Looks until `seen` is what is expected.
#[track_caller]
pub fn eventually<T: PartialEq + std::fmt::Debug>(what: &str, expected: T, mut seen: impl FnMut() -> T) {
    let until = Instant::now() + DEADLINE;
    loop {
        let now = seen();
        if now == expected {
            return;
        }
        assert!(Instant::now() < until, "{what}: expected {expected:?}, and it stayed {now:?}");
        std::thread::sleep(LOOK);
    }
}

/// Waits until these processes are idle: every queue of each is empty, and no message from one to another is unread.
#[track_caller]
pub fn settle<const N: usize>(mut children: [&mut Child; N]) {
    let until = Instant::now() + DEADLINE;
    let mut before = None;
    loop {
        let done = children.each_mut().map(|child| child.idle());
        if before == Some(done) {
            return;
        }
        assert!(Instant::now() < until, "the processes do not come to rest: {before:?}, then {done:?}");
        before = Some(done);
    }
}

/// Waits until an idle process has no more of anything than `before`: the words of a dead peer are poisoned for half a second, and
/// stay mapped meanwhile.
///
/// # Panics
///
/// Panics with the last census after [`DEADLINE`].
#[track_caller]
pub fn no_more_than(before: &Census, what: &str, child: &mut Child) {
    let until = Instant::now() + DEADLINE;
    loop {
        child.idle();
        let now = child.census();
        if !now.exceeds(before) {
            return;
        }
        assert!(Instant::now() < until, "{what}: expected no more than {before:?}, and it stayed {now:?}");
        std::thread::sleep(LOOK);
    }
}

/// Advances the clock of an agent until something has happened. Returns the time that has passed on its clock, at most. The agent's
/// waits notice an advance if they have begun after its first command `advance`.
///
/// # Panics
///
/// Panics after [`DEADLINE`].
#[track_caller]
pub fn advance_until(agent: &mut Child, mut has_happened: impl FnMut() -> bool) -> Duration {
    const STEP: Duration = Duration::from_millis(500);
    let (begun, mut advanced) = (Instant::now(), Duration::ZERO);
    while !has_happened() {
        assert!(begun.elapsed() < DEADLINE, "nothing has happened although the clock is {advanced:?} ahead");
        agent.ok(&format!("advance {}", STEP.as_millis()));
        advanced += STEP;
        std::thread::sleep(LOOK);
    }
    begun.elapsed() + advanced
}

/// Runs it, and makes sure that it took no longer.
#[track_caller]
pub fn within<T>(limit: Duration, what: &str, body: impl FnOnce() -> T) -> T {
    let since = Instant::now();
    let value = body();
    let took = since.elapsed();
    assert!(took <= limit, "{what} took {took:?}, and at most {limit:?} was to be expected");
    value
}
