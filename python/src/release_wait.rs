//! Waits for the release of an export, which a forgotten variable can hold for ever.

use std::time::{Duration, Instant};

use device_ipc::{Descriptor, Error, Holders};
use pyo3::prelude::*;

use crate::error::exception;
use crate::{uses, wait};

/// The time after which a wait without a limit fails if this process alone holds the export.
const LONG: Duration = Duration::from_secs(5);

/// A wait for the release of an export, in slices.
pub(crate) struct ReleaseWait<'a> {
    descriptor: &'a Descriptor,
    limit: Duration,
    begun: Instant,
    /// The time since which this process alone holds the export.
    alone: Option<Instant>,
}

impl<'a> ReleaseWait<'a> {
    pub(crate) fn new(descriptor: &'a Descriptor, limit: Duration) -> Self {
        Self { descriptor, limit, begun: Instant::now(), alone: None }
    }

    pub(crate) const fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns the time limit of the next slice.
    pub(crate) fn slice(&self) -> Duration {
        self.limit.saturating_sub(self.begun.elapsed()).min(wait::SLICE)
    }

    /// Returns whether the time is over.
    pub(crate) fn is_over(&self) -> bool {
        self.begun.elapsed() >= self.limit
    }

    /// Called after a slice in which processes held the export. Fails when the time is over, and for a wait without a limit that only
    /// this process can end, as no other thread has done so for 5 s.
    pub(crate) fn check(&mut self, py: Python<'_>, holders: &Holders) -> PyResult<()> {
        py.check_signals()?;
        let (now, own) = (Instant::now(), std::process::id());
        let is_alone = holders.iter().len() > 0 && holders.iter().all(|holder| holder.pid == own);
        self.alone = if is_alone { self.alone.or(Some(now)) } else { None };
        let is_stuck = self.limit >= wait::FOREVER && self.alone.is_some_and(|since| now - since > LONG);
        if self.is_over() || is_stuck {
            return Err(self.still_held(py, holders));
        }
        Ok(())
    }

    /// Returns the error, with the names of the tensors by which this process holds the export.
    fn still_held(&self, py: Python<'_>, holders: &Holders) -> PyErr {
        let after = if self.is_over() { self.limit } else { self.begun.elapsed() };
        let error = exception(py, &Error::StillHeld { after, holders: holders.clone() });
        let is_own = holders.iter().any(|holder| holder.pid == std::process::id());
        let (names, is_open) = uses::of(self.descriptor);
        if is_own && is_open {
            let what = if names.is_empty() {
                "a mapping that is not closed".to_owned()
            } else {
                format!(
                    "the tensors {}, which a variable still names, such as that of a loop",
                    quoted(&names)
                )
            };
            let text = format!("{}; this process holds it by {what}", error.value(py));
            let _ = error.value(py).setattr("args", (text,));
        }
        error
    }
}

/// Returns names in quotes, the first eight.
fn quoted(names: &[String]) -> String {
    let mut quoted: Vec<_> = names.iter().take(8).map(|name| format!("{name:?}")).collect();
    if names.len() > 8 {
        quoted.push(format!("and {} more", names.len() - 8));
    }
    quoted.join(", ")
}
