//! Calls that can be interrupted, for programs that handle signals.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// The longest time between two checks.
const PERIOD: Duration = Duration::from_millis(50);

/// The state of a thread.
#[derive(Clone, Copy)]
enum Interruption {
    /// In no interruptible call.
    Plain,
    /// In a call that was checked at this time.
    Interruptible(Instant),
    Interrupted,
}

type Check = Box<dyn Fn() -> bool>;

thread_local! {
    /// Without a destructor: waits take place until the end of a thread.
    static STATE: Cell<Interruption> = const { Cell::new(Interruption::Plain) };
    static CHECK: RefCell<Option<Check>> = const { RefCell::new(None) };
}

/// Runs a call that `check` can interrupt: while this thread waits in it, `check` is called every 50 ms. Once it returns true, each
/// wait of this thread in the call fails as if its time limit were over.
///
/// For programs whose signal handlers only record the signal, as those of Python do. A call of the driver is not interrupted.
///
/// ```
/// # use std::sync::atomic::{AtomicBool, Ordering};
/// static HAS_SIGNAL: AtomicBool = AtomicBool::new(false);
/// let closed = device_ipc_core::front_end::interruptible(|| HAS_SIGNAL.load(Ordering::Relaxed), || device_ipc_core::close_unused(std::time::Duration::from_secs(60)));
/// # closed.unwrap();
/// ```
pub fn interruptible<T>(check: impl Fn() -> bool + 'static, call: impl FnOnce() -> T) -> T {
    /// Restores the call around this one, also after a panic.
    struct Outer(Interruption, Option<Check>);
    impl Drop for Outer {
        fn drop(&mut self) {
            STATE.set(self.0);
            CHECK.set(self.1.take());
        }
    }
    let check = CHECK.replace(Some(Box::new(check)));
    let _outer = Outer(STATE.replace(Interruption::Interruptible(Instant::now())), check);
    call()
}

pub(super) fn is_interruptible() -> bool {
    !matches!(STATE.get(), Interruption::Plain)
}

pub(super) fn is_interrupted() -> bool {
    matches!(STATE.get(), Interruption::Interrupted)
}

pub(super) fn is_check_due() -> bool {
    matches!(STATE.get(), Interruption::Interruptible(checked) if checked.elapsed() >= PERIOD)
}

/// Checks, if that is due. Returns the time for which the thread may wait before the next check.
pub(super) fn slice(left: Duration) -> Duration {
    if is_check_due() {
        // Taken out: the check may call this crate.
        STATE.set(Interruption::Plain);
        let check = CHECK.take();
        let is_interrupted = check.as_ref().is_some_and(|check| check());
        CHECK.set(check);
        STATE.set(if is_interrupted {
            Interruption::Interrupted
        } else {
            Interruption::Interruptible(Instant::now())
        });
    }
    match STATE.get() {
        Interruption::Plain => left,
        Interruption::Interruptible(_) => left.min(PERIOD),
        Interruption::Interrupted => Duration::ZERO,
    }
}
