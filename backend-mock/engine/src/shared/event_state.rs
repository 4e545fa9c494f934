//! The state of an event, in memory that several processes may share.
//!
//! Why a ring: a wait captures the record that was submitted last *at the time of
//! the call*, and either side may record again before that one is done. Each record
//! therefore has a number and a cell of its own. Why the recorder's pid is in the cell:
//! a stream that waits for a process that died must fail, not wait for ever.
//!
//! No locks: a process can be killed between any two instructions, and what it
//! leaves behind must make sense to the others.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::model::EngineError;
use crate::system::ProcessId;

/// Records of one event that can be told apart. When a record is overwritten by the one this many later, those
/// who still wait for it are let go.
const RING: usize = 256;

/// How long a waiter sleeps before it looks whether the recorder still lives.
const PATIENCE: Duration = Duration::from_millis(5);

/// Numbers of records wrap around in 30 bits, without 0.
const SEQUENCE_MASK: u32 = (1 << 30) - 1;
const PID_MASK: u32 = (1 << 22) - 1;
const START_MASK: u64 = (1 << 10) - 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Pending = 0,
    Done = 1,
    Failed = 2,
}

/// A record, as its cell holds it: number (30 bits), progress (2), pid (22, Linux has no larger ones) and the low
/// bits of the start time (10), so that a reused pid is taken for the recorder once in a thousand times only.
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

/// A record that was submitted. 0: none was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record(u32);

/// How far an event has come. All zero: never recorded.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct EventState {
    submitted: AtomicU32,
    /// Rung at every completion; waiters sleep on it.
    bell: AtomicU32,
    ring: [AtomicU64; RING],
}

impl Default for EventState {
    fn default() -> Self {
        Self {
            submitted: AtomicU32::new(0),
            bell: AtomicU32::new(0),
            ring: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl EventState {
    /// The record that was submitted last, by whichever process.
    pub(crate) fn latest(&self) -> Record {
        Record(self.submitted.load(Ordering::Acquire) & SEQUENCE_MASK)
    }

    /// Submits a record by process `me`.
    pub(crate) fn submit(&self, me: ProcessId) -> Record {
        loop {
            let last = self.submitted.load(Ordering::Acquire);
            let next = following(last);
            let cell = self.cell(next);
            let before = cell.load(Ordering::Acquire);
            if Cell::unpack(before).sequence == next {
                // Another process has taken the number and not said so yet, perhaps never will: help it.
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

    /// Completes a record of this process: its work is done, or will never be.
    pub(crate) fn complete(&self, record: Record, succeeded: bool) {
        let cell = self.cell(record.0);
        let bits = cell.load(Ordering::Acquire);
        let before = Cell::unpack(bits);
        if before.sequence == record.0 && before.progress == Progress::Pending {
            let progress = if succeeded { Progress::Done } else { Progress::Failed };
            let after = Cell { progress, ..before }.pack();
            // Fails only if the ring has come round; then nobody asks for this record any more.
            let _ = cell.compare_exchange(bits, after, Ordering::AcqRel, Ordering::Relaxed);
        }
        self.bell.fetch_add(1, Ordering::AcqRel);
        // Nothing to do about a failure: waiters look again by themselves after `PATIENCE`.
        let _ = futex::wake(&self.bell, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Whether the record is complete.
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

    /// Waits until the record is complete; `Ok(false)` once `deadline` has passed. `seen` says whether this process can
    /// see that the recorder has ended.
    ///
    /// # Errors
    /// `RecordFailed`, `PeerLost`, and `Cancelled` when `cancelled` says so.
    pub(crate) fn wait(
        &self,
        record: Record,
        deadline: Option<Instant>,
        seen: bool,
        cancelled: impl Fn() -> bool,
    ) -> Result<bool, EngineError> {
        loop {
            let bell = self.bell.load(Ordering::Acquire);
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
            let slice = left.map_or(PATIENCE, |left| left.min(PATIENCE));
            let slice = rustix::time::Timespec { tv_sec: 0, tv_nsec: slice.as_nanos() as _ };
            // Woken, timed out or interrupted: in every case look again.
            let _ = futex::wait(&self.bell, futex::Flags::empty(), bell, Some(&slice));
            let cell = self.look(record);
            // It may have completed and ended since we looked, so look once more before the verdict.
            if seen
                && cell.progress == Progress::Pending
                && !cell.recorder_is_alive()
                && self.look(record).progress == Progress::Pending
            {
                return Err(EngineError::PeerLost { pid: cell.pid });
            }
        }
    }

    /// The record's cell; done if there is no record, or a later one has its place.
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
    fn an_event_that_was_never_recorded_is_complete() {
        let event = EventState::default();
        assert_eq!(event.is_complete(event.latest()), Ok(true));
    }

    #[test]
    fn a_later_record_does_not_complete_an_earlier_one() {
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
    fn a_record_is_let_go_when_the_ring_comes_round() {
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
    fn numbers_wrap_around_without_zero() {
        let event = EventState::default();
        event.submitted.store(SEQUENCE_MASK - 1, Ordering::Relaxed);
        let me = ProcessId::current();
        assert_eq!(event.submit(me), Record(SEQUENCE_MASK));
        assert_eq!(event.submit(me), Record(1));
    }

    #[test]
    fn a_number_that_a_dead_process_took_and_did_not_publish_is_passed_over() {
        let (event, me) = (EventState::default(), ProcessId::current());
        let dead = ProcessId { pid: PID_MASK, start: 3 };
        event.submit(dead);
        event.submitted.store(0, Ordering::Relaxed);
        assert_eq!(event.submit(me), Record(2));
        assert_eq!(event.wait(Record(1), None, true, || false), Err(EngineError::PeerLost { pid: PID_MASK }));
    }

    #[test]
    fn a_cell_packs_and_unpacks() {
        let cell =
            Cell { sequence: SEQUENCE_MASK, progress: Progress::Failed, pid: PID_MASK, start: START_MASK };
        assert_eq!(Cell::unpack(cell.pack()), cell);
        assert_eq!(Cell::unpack(0).sequence, 0);
    }
}
