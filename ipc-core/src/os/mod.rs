//! Operating system: environment variables, process identity, fork detection, threads, clock, timers, spinning, intervals of polls, received files, readiness of descriptors.

mod backoff;
pub(crate) mod clock;
mod condvar;
pub mod environment;
mod exit;
mod fork;
pub(crate) mod kill;
pub(crate) mod log;
mod pace;
pub(crate) mod process;
mod readiness;
pub(crate) mod received_file;
mod recent;
mod thread;
mod timers;

pub(crate) use backoff::{Backoff, wait_for_words};
pub(crate) use condvar::Condvar;
pub(crate) use exit::at_exit;
pub(crate) use fork::ClosedByFork;
pub use fork::process_epoch;
pub(crate) use pace::{Pace, PollMode, SPIN};
pub(crate) use readiness::Readiness;
pub(crate) use recent::Recent;
pub(crate) use thread::spawn_without_signals;
pub(crate) use timers::{TimerId, Timers};
