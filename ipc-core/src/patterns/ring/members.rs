//! The writer's list of the readers of a ring.
//!
//! Three kinds of threads use it: the writer's thread, the poller (when a reader opens the ring) and threads that query the
//! readers. No thread holds the lock during a driver call, because the poller must not wait for one.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::order::CompletionOrder;
use crate::model::lease::{Holder, LeaseId};
use crate::os::kill::kill_point;
use crate::os::log::Throttle;
use crate::os::{Condvar, clock};
use crate::sharing::export::TimelineObserver;
use crate::sharing::timeline::{Finish, OwnCounter, Poison, Seen, Termination, Timeline};
use crate::sharing::{Runtime, RuntimeRef};

/// The readers of a ring.
#[derive(Debug)]
pub(super) struct Members {
    /// Counts the publications signalled by streams; `None` if the host signals.
    own: Option<Arc<OwnCounter>>,
    runtime: RuntimeRef,
    state: Mutex<MemberList>,
    changed: Condvar,
    /// The version of the list, so that the writer detects changes without the lock.
    version: AtomicU64,
}

#[derive(Debug)]
struct MemberList {
    members: Vec<Arc<Member>>,
    /// The next sequence to publish, at which new readers begin.
    next: u64,
    closed: bool,
    /// Publications signalled by the host.
    published: CompletionOrder,
}

/// A reader.
#[derive(Debug)]
pub(super) struct Member {
    lease: LeaseId,
    program: String,
    start: u64,
    pub(super) timeline: Timeline,
    dismissed: AtomicBool,
    /// The largest counter value that was observed; a decrease is a protocol violation.
    highest: AtomicU64,
    own: Option<Arc<OwnCounter>>,
    runtime: RuntimeRef,
}

/// The progress of a ring's reader.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReaderPosition {
    /// The reader's lease, for [`Ring::dismiss`](crate::Ring::dismiss).
    pub lease: LeaseId,
    /// The reader's process id in the writer's pid namespace, as reported by the kernel; 0 for a process outside of it. The process
    /// id on its own host, as the reader states it, for a reader on another host, whose program name ends with its address.
    pub pid: u32,
    /// The reader's program name, as the reader states it.
    pub program: String,
    /// The first sequence that the reader has not released.
    pub sequence: u64,
}

impl fmt::Display for ReaderPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({}) has not released sequence {}", self.pid, self.program, self.sequence)
    }
}

impl Member {
    /// Returns the first sequence that the reader has not released, or `None` if it has left.
    ///
    /// A reader can write any value to its counter. A reader that releases an unpublished sequence, or revokes a release, is
    /// dismissed.
    pub(super) fn position(&self) -> Option<u64> {
        match self.timeline.seen() {
            Seen::Live(released) if !self.is_dismissed() => match self.checked(released) {
                Ok(released) => Some(released.max(self.start)),
                Err(why) => {
                    let (pid, program) = (self.timeline.peer(), &self.program);
                    static WARNINGS: Throttle = Throttle::new();
                    if let Some(count) = WARNINGS.count() {
                        tracing::warn!(target: crate::os::log::RING, pid, program, why, count, "dismissing a ring reader that violates the protocol");
                    }
                    self.dismiss();
                    None
                }
            },
            _ => None,
        }
    }

    /// Returns whether the reader has not released a sequence.
    pub(super) fn is_behind(&self, sequence: u64) -> bool {
        self.position().is_some_and(|position| position <= sequence)
    }

    /// Validates the reader's counter.
    fn checked(&self, released: u64) -> Result<u64, String> {
        // Loaded after the counter: a publication is counted before any reader is notified.
        let published = self.timeline.last_signalled();
        if released > published {
            return Err(format!(
                "its counter is {released}, but only {published} publications were signalled to it"
            ));
        }
        let highest = self.highest.fetch_max(released, Ordering::AcqRel);
        if released >= highest {
            return Ok(released);
        }
        // Another thread may have observed a later value.
        match self.timeline.seen() {
            Seen::Live(again) if again < highest => {
                Err(format!("its counter decreased from {highest} to {again}"))
            }
            _ => Ok(highest),
        }
    }

    /// Returns whether the reader's shared counter says that all earlier publications have arrived. The reader can write it
    /// too.
    pub(super) fn has_been_notified(&self, sequence: u64) -> bool {
        self.timeline.last_signalled() == sequence && self.timeline.has_arrived()
    }

    pub(super) fn is_dismissed(&self) -> bool {
        self.dismissed.load(Ordering::Acquire)
    }

    fn is_present(&self) -> bool {
        self.position().is_some()
    }

    /// Removes the reader: marks it as dismissed before its slots are overwritten, then releases the streams that wait for it,
    /// and its own streams that wait for the writer.
    pub(super) fn dismiss(&self) {
        self.timeline.store_dismissed();
        self.dismissed.store(true, Ordering::Release);
        self.timeline.endpoint().end(Termination::Released);
        if let Some(runtime) = self.runtime.here() {
            if self.timeline.endpoint().needs_poison() {
                runtime.poller.poison_again(Poison::Timeline(Arc::clone(self.timeline.endpoint())));
            }
            self.finish(runtime, 0);
        }
    }

    /// Ends the reader's counter of publications once `least` has been signalled and has arrived.
    fn finish(&self, runtime: &Runtime, least: u64) {
        let (timeline, order) = (self.timeline.clone(), self.own.clone());
        runtime.poller.finish_once_arrived(Finish { timeline, least, order });
    }

    fn describe(&self, sequence: u64) -> ReaderPosition {
        let (pid, program) = (self.timeline.peer(), self.program.clone());
        ReaderPosition { lease: self.lease, pid, program, sequence }
    }
}

impl Members {
    /// `first` is the sequence of the first publication.
    pub(super) fn new(own: Option<Arc<OwnCounter>>, first: u64, runtime: RuntimeRef) -> Self {
        Self {
            own,
            runtime,
            state: Mutex::new(MemberList {
                members: Vec::new(),
                next: first,
                closed: false,
                published: CompletionOrder::from(first),
            }),
            changed: Condvar::new(),
            version: AtomicU64::new(1),
        }
    }

    /// Copies the list into `known` if it has changed since `version`.
    pub(super) fn update(&self, known: &mut Vec<Arc<Member>>, version: &mut u64) {
        if self.version.load(Ordering::Acquire) == *version {
            return;
        }
        let mut state = self.lock();
        self.remove_absent(&mut state);
        known.clone_from(&state.members);
        *version = self.version.load(Ordering::Acquire);
    }

    /// Makes new readers begin after this sequence. Returns `false` if the list has changed since `version`: a new reader may
    /// have to be notified.
    pub(super) fn advance(&self, published: u64, version: u64) -> bool {
        let mut state = self.lock();
        let unchanged = self.version.load(Ordering::Acquire) == version;
        if unchanged {
            state.next = published + 1;
        }
        unchanged
    }

    /// Signals the completion of a sequence to all readers from the host, once all earlier sequences are complete.
    pub(super) fn signal_complete(&self, sequence: u64) {
        let mut state = self.lock();
        let published = state.published.complete(sequence);
        for member in &state.members {
            if published > member.start {
                // The signal fails if the reader has received it before, or has left.
                let _ = member.timeline.signal_now(published);
            }
        }
    }

    /// Returns the first sequence that the host has not signalled.
    pub(super) fn first_unsignalled(&self) -> u64 {
        self.lock().published.next()
    }

    /// Notifies readers of the total number of publications, and releases streams that wait for more once all have arrived.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let (total, members) = (state.next, state.members.clone());
        drop(state);
        for member in members {
            close_for(&member, total);
        }
        kill_point!("exporter:ring-closed");
    }

    pub(super) fn count(&self) -> usize {
        self.lock().members.iter().filter(|member| member.is_present()).count()
    }

    /// Waits until there are at least `count` readers. Fails with the actual number at the deadline.
    pub(super) fn wait(&self, count: usize, until: Instant) -> Result<(), usize> {
        let mut state = self.lock();
        loop {
            let found = state.members.iter().filter(|member| member.is_present()).count();
            if found >= count {
                return Ok(());
            }
            let left = clock::left(until);
            if left.is_zero() {
                return Err(found);
            }
            state = self.changed.wait_timeout(&self.state, state, left);
        }
    }

    /// Returns the readers that have not released this sequence, the slowest first.
    pub(super) fn behind(&self, sequence: u64) -> Vec<ReaderPosition> {
        let state = self.lock();
        let described = |member: &Arc<Member>| {
            let position = member.position().filter(|position| *position <= sequence)?;
            Some(member.describe(position))
        };
        let mut behind: Vec<_> = state.members.iter().filter_map(described).collect();
        behind.sort_by_key(|reader| reader.sequence);
        behind
    }

    /// Returns whether a reader has not released this sequence, or the host has not signalled it.
    pub(super) fn is_in_use(&self, sequence: u64) -> bool {
        let state = self.lock();
        let is_unsignalled = self.own.is_none() && state.published.next() <= sequence;
        is_unsignalled || state.members.iter().any(|member| member.is_behind(sequence))
    }

    /// Returns the sequence whose slot the next publication reuses, in a ring of `slots` slots.
    pub(super) fn next_to_be_released(&self, slots: u32) -> Option<u64> {
        self.lock().next.checked_sub(u64::from(slots))
    }

    /// Dismisses a reader and returns whether it was present.
    pub(super) fn dismiss(&self, lease: LeaseId) -> bool {
        let mut state = self.lock();
        let Some(at) = state.members.iter().position(|member| member.lease == lease) else { return false };
        let member = state.members.remove(at);
        self.bump_version();
        drop(state);
        let was_present = member.is_present();
        member.dismiss();
        tracing::info!(target: crate::os::log::RING, pid = member.timeline.peer(), program = member.program, "dismissing a ring reader");
        was_present
    }

    fn remove_absent(&self, state: &mut MemberList) {
        let before = state.members.len();
        state.members.retain(|member| member.is_present());
        if state.members.len() != before {
            self.bump_version();
        }
    }

    /// Increments the version. The caller holds the lock.
    fn bump_version(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, MemberList> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TimelineObserver for Members {
    fn taken(&self, lease: LeaseId, holder: &Holder, timeline: &Timeline) {
        let mut state = self.lock();
        self.remove_absent(&mut state);
        let start = state.next;
        timeline.store_start(start);
        let (program, timeline) = (holder.program.clone(), timeline.clone());
        let (dismissed, highest) = (AtomicBool::new(false), AtomicU64::new(0));
        let (own, runtime) = (self.own.clone(), self.runtime);
        let member = Arc::new(Member { lease, program, start, timeline, dismissed, highest, own, runtime });
        state.members.push(Arc::clone(&member));
        self.bump_version();
        let closed = state.closed;
        drop(state);
        if closed {
            close_for(&member, start);
        }
        kill_point!("exporter:ring-joined");
    }
}

fn close_for(member: &Member, total: u64) {
    member.timeline.store_total(total);
    if let Some(runtime) = member.runtime.here() {
        // A reader that joined after the last publication has received no signal.
        let least = if member.start < total { total } else { 0 };
        member.finish(runtime, least);
    }
}

/// Formats the readers that are behind for an error.
pub(super) fn describe_readers(behind: &[ReaderPosition]) -> String {
    const NAMED: usize = 8;
    let mut words: String = behind.iter().take(NAMED).map(|reader| format!("; {reader}")).collect();
    if behind.len() > NAMED {
        words += &format!("; and {} more", behind.len() - NAMED);
    }
    words
}
