//! The state of an event, in memory that several processes may share.
//!
//! A wait captures the record that was submitted last *at the time of the call*, and either process may record
//! again before that record is complete. Each record therefore has a sequence number and its own cell of a ring. The
//! cell names the recording process, so that a stream that waits for a dead process fails.
//!
//! The state has no locks: a process can be killed between any two instructions, and the others must be able to
//! use the state that it leaves.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::model::EngineError;
use crate::system::ProcessId;

/// Number of records of one event that are distinguished. When a later record takes the cell of a record, waits for
/// the earlier one end.
const RING: usize = 256;

/// Interval at which a waiter checks whether the recorder is alive.
const RECORDER_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Sequence numbers wrap around at 30 bits and skip 0.
const SEQUENCE_MASK: u32 = (1 << 30) - 1;
const PID_MASK: u32 = (1 << 22) - 1;
const START_MASK: u64 = (1 << 10) - 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Pending = 0,
    Done = 1,
    Failed = 2,
}

/// The content of a cell: sequence number (30 bits), progress (2), pid (22, the maximum of Linux) and the low bits of
/// the start time (10), so that a reused pid is mistaken for the recorder only once in a thousand times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    sequence: u32,
    progress: Progress,
    pid: u32,
    start: u64,
}

impl Cell {
    fn pack(self) -> u64 {
        (u64::from(self.sequence) << 34)
            | ((self.progress as u64) << 32)
            | (u64::from(self.pid & PID_MASK) << 10)
            | (self.start & START_MASK)
    }

    fn unpack(bits: u64) -> Self {
        Self {
            sequence: (bits >> 34) as u32,
            progress: match (bits >> 32) & 3 {
                0 => Progress::Pending,
                1 => Progress::Done,
                _ => Progress::Failed,
            },
            pid: (bits >> 10) as u32 & PID_MASK,
            start: bits & START_MASK,
        }
    }

    fn recorder_is_alive(self) -> bool {
        ProcessId::of(self.pid).is_some_and(|process| process.start & START_MASK == self.start)
    }
}

/// The sequence number of a submitted record; 0 if there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record(u32);

/// The state of an event. All zeros mean that it was never recorded.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct EventState {
    submitted: AtomicU32,
    /// Futex: incremented at every completion.
    completions: AtomicU32,
    ring: [AtomicU64; RING],
}

impl Default for EventState {
    fn default() -> Self {
        Self {
            submitted: AtomicU32::new(0),
            completions: AtomicU32::new(0),
            ring: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl EventState {
    /// Returns the record that was submitted last, by any process.
    pub(crate) fn latest(&self) -> Record {
        Record(self.submitted.load(Ordering::Acquire) & SEQUENCE_MASK)
    }

    /// Submits a record of the process `me`.
    pub(crate) fn submit(&self, me: ProcessId) -> Record {
        loop {
            let last = self.submitted.load(Ordering::Acquire);
            let next = following(last);
            let cell = self.cell(next);
            let before = cell.load(Ordering::Acquire);
            if Cell::unpack(before).sequence == next {
                // Another process has taken the number and not published it yet. It may be dead, so publish it.
                let _ = self.submitted.compare_exchange(last, next, Ordering::AcqRel, Ordering::Relaxed);
                continue;
            }
            let mine =
                Cell { sequence: next, progress: Progress::Pending, pid: me.pid, start: me.start }.pack();
            if cell.compare_exchange(before, mine, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                let _ = self.submitted.compare_exchange(last, next, Ordering::AcqRel, Ordering::Relaxed);
                return Record(next);
            }
        }
    }

    /// Completes a record of this process: its work is complete or has failed.
    pub(crate) fn complete(&self, record: Record, succeeded: bool) {
        let cell = self.cell(record.0);
        let bits = cell.load(Ordering::Acquire);
        let before = Cell::unpack(bits);
        if before.sequence == record.0 && before.progress == Progress::Pending {
            let progress = if succeeded { Progress::Done } else { Progress::Failed };
            let after = Cell { progress, ..before }.pack();
            // Fails only if a later record has taken the cell; then no process waits for this record.
            let _ = cell.compare_exchange(bits, after, Ordering::AcqRel, Ordering::Relaxed);
        }
        self.completions.fetch_add(1, Ordering::AcqRel);
        // A failure needs no handling: waiters check again after `RECORDER_CHECK_INTERVAL`.
        let _ = futex::wake(&self.completions, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Returns whether the record is complete.
    ///
    /// # Errors
    /// `RecordFailed`.
    pub(crate) fn is_complete(&self, record: Record) -> Result<bool, EngineError> {
        match self.look(record) {
            Cell { progress: Progress::Pending, .. } => Ok(false),
            Cell { progress: Progress::Done, .. } => Ok(true),
            Cell { progress: Progress::Failed, .. } => Err(EngineError::RecordFailed),
        }
    }

    /// Waits until the record is complete; returns `Ok(false)` once `deadline` has passed. `recorder_visible` says
    /// whether this process can detect the death of the recorder.
    ///
    /// # Errors
    /// `RecordFailed`, `PeerLost`, and `Cancelled` when `cancelled` returns true.
    pub(crate) fn wait(
        &self,
        record: Record,
        deadline: Option<Instant>,
        recorder_visible: bool,
        cancelled: impl Fn() -> bool,
    ) -> Result<bool, EngineError> {
        loop {
            let completions = self.completions.load(Ordering::Acquire);
            if self.is_complete(record)? {
                return Ok(true);
            }
            if cancelled() {
                return Err(EngineError::Cancelled);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(false);
            }
            let slice = left.map_or(RECORDER_CHECK_INTERVAL, |left| left.min(RECORDER_CHECK_INTERVAL));
            let slice = rustix::time::Timespec { tv_sec: 0, tv_nsec: slice.as_nanos() as _ };
            // Woken, timed out or interrupted: check again in every case.
            let _ = futex::wait(&self.completions, futex::Flags::empty(), completions, Some(&slice));
            let cell = self.look(record);
            // The recorder may have completed the record and exited since the first look, so look again.
            if recorder_visible
                && cell.progress == Progress::Pending
                && !cell.recorder_is_alive()
                && self.look(record).progress == Progress::Pending
            {
                return Err(EngineError::PeerLost { pid: cell.pid });
            }
        }
    }

    /// Returns the cell of the record; done if there is no record, or a later one has taken its cell.
    fn look(&self, record: Record) -> Cell {
        let cell = Cell::unpack(self.cell(record.0).load(Ordering::Acquire));
        if record.0 == 0 || cell.sequence != record.0 {
            return Cell { progress: Progress::Done, ..cell };
        }
        cell
    }

    fn cell(&self, sequence: u32) -> &AtomicU64 {
        &self.ring[sequence as usize % RING]
    }
}

fn following(sequence: u32) -> u32 {
    match sequence.wrapping_add(1) & SEQUENCE_MASK {
        0 => 1,
        next => next,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_never_recorded_is_complete() {
        let event = EventState::default();
        assert_eq!(event.is_complete(event.latest()), Ok(true));
    }

    #[test]
    fn later_record_does_not_complete_earlier_record() {
        let (event, me) = (EventState::default(), ProcessId::current());
        let first = event.submit(me);
        let second = event.submit(me);
        event.complete(second, true);
        assert_eq!(event.is_complete(first), Ok(false));
        assert_eq!(event.is_complete(event.latest()), Ok(true));
        event.complete(first, false);
        assert_eq!(event.is_complete(first), Err(EngineError::RecordFailed));
    }

    #[test]
    fn record_overwritten_in_ring_counts_as_complete() {
        let (event, me) = (EventState::default(), ProcessId::current());
        let first = event.submit(me);
        for _ in 0..RING {
            event.submit(me);
        }
        assert_eq!(event.is_complete(first), Ok(true));
        event.complete(first, true);
        assert_eq!(event.is_complete(event.latest()), Ok(false));
    }

    #[test]
    fn sequence_numbers_wrap_around_without_zero() {
        let event = EventState::default();
        event.submitted.store(SEQUENCE_MASK - 1, Ordering::Relaxed);
        let me = ProcessId::current();
        assert_eq!(event.submit(me), Record(SEQUENCE_MASK));
        assert_eq!(event.submit(me), Record(1));
    }

    #[test]
    fn unpublished_record_of_dead_process_is_skipped() {
        let (event, me) = (EventState::default(), ProcessId::current());
        let dead = ProcessId { pid: PID_MASK, start: 3 };
        event.submit(dead);
        event.submitted.store(0, Ordering::Relaxed);
        assert_eq!(event.submit(me), Record(2));
        assert_eq!(event.wait(Record(1), None, true, || false), Err(EngineError::PeerLost { pid: PID_MASK }));
    }

    #[test]
    fn cell_round_trips_through_its_bits() {
        let cell =
            Cell { sequence: SEQUENCE_MASK, progress: Progress::Failed, pid: PID_MASK, start: START_MASK };
        assert_eq!(Cell::unpack(cell.pack()), cell);
        assert_eq!(Cell::unpack(0).sequence, 0);
    }
}
