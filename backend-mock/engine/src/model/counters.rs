//! Counts the calls of the engine and injects faults into them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::error::EngineError;
use super::operation::{Fault, Operation};

/// A snapshot of the number of calls of each operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counters([u64; Operation::ALL.len()]);

impl Counters {
    /// Returns the calls of one operation since the machine was created, including failed ones.
    pub fn get(&self, operation: Operation) -> u64 {
        self.0[operation as usize]
    }

    /// Iterates over all operations with their calls.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, u64)> + '_ {
        Operation::ALL.iter().map(|&operation| (operation, self.get(operation)))
    }

    /// Returns the calls between the snapshot `earlier` and this one.
    #[must_use]
    pub fn since(&self, earlier: &Counters) -> Counters {
        Counters(std::array::from_fn(|index| self.0[index] - earlier.0[index]))
    }
}

/// The call counters and the armed faults of a machine.
#[derive(Debug)]
pub(crate) struct Instrumentation {
    calls: [AtomicU64; Operation::ALL.len()],
    armed: Mutex<Vec<Fault>>,
}

impl Instrumentation {
    pub(crate) fn new(faults: &[Fault]) -> Self {
        Self { calls: std::array::from_fn(|_| AtomicU64::new(0)), armed: Mutex::new(faults.to_vec()) }
    }

    /// Counts one call of `operation`, and fails if an armed fault is due.
    pub(crate) fn on_call(&self, operation: Operation) -> Result<(), EngineError> {
        self.calls[operation as usize].fetch_add(1, Ordering::Relaxed);
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = None;
        armed.retain_mut(|fault| {
            if fault.operation != operation {
                return true;
            }
            fault.after = fault.after.saturating_sub(1);
            if fault.after == 0 && due.is_none() {
                due = Some(fault.code);
                return false;
            }
            true
        });
        due.map_or(Ok(()), |code| Err(EngineError::Injected { operation, code }))
    }

    pub(crate) fn arm(&self, fault: Fault) {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }

    pub(crate) fn snapshot(&self) -> Counters {
        Counters(std::array::from_fn(|index| self.calls[index].load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nth_call_fails_once() {
        let calls = Instrumentation::new(&[Fault { operation: Operation::Open, after: 2, code: 7 }]);
        assert_eq!(calls.on_call(Operation::Close), Ok(()));
        assert_eq!(calls.on_call(Operation::Open), Ok(()));
        assert_eq!(
            calls.on_call(Operation::Open),
            Err(EngineError::Injected { operation: Operation::Open, code: 7 })
        );
        assert_eq!(calls.on_call(Operation::Open), Ok(()));
        assert_eq!(calls.snapshot().get(Operation::Open), 3);
    }
}
