//! The readers of a ring, as its writer knows them.
//!
//! Three threads meet here: the writer's, the poller's (a reader has joined) and anybody's who asks who is behind. The lock is
//! short: nobody holds it over a driver call, as the poller may not wait for one.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::order::InOrder;
use crate::model::lease::{Holder, LeaseId};
use crate::os::kill::kill_point;
use crate::sharing::Runtime;
use crate::sharing::export::TimelineObserver;
use crate::sharing::timeline::{End, OwnCounter, Seen, Timeline};
use crate::transport::{Finish, Poison};

/// The readers of a ring.
#[derive(Debug)]
pub(super) struct Members {
    /// Counts what has been signalled to readers by streams; `None` where the host signals.
    own: Option<Arc<OwnCounter>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Counts the changes of the list, so that the writer sees without the lock that there is none.
    version: AtomicU64,
}

#[derive(Debug)]
struct State {
    members: Vec<Arc<Member>>,
    /// The sequence that is published next: where newcomers begin.
    next: u64,
    closed: bool,
    /// Publications that the host tells of.
    told: InOrder,
}

/// A reader.
#[derive(Debug)]
pub(super) struct Member {
    lease: LeaseId,
    program: String,
    start: u64,
    pub(super) timeline: Timeline,
    dismissed: AtomicBool,
    /// The largest counter of it that was seen: it never goes back.
    highest: AtomicU64,
    own: Option<Arc<OwnCounter>>,
}

/// How far a reader of a ring has come.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReaderPosition {
    /// Its lease: what it is dismissed by.
    pub lease: LeaseId,
    /// Its process id in the writer's pid namespace, as the kernel tells it; 0 for a process of another one.
    pub pid: u32,
    /// Its program, as it calls itself.
    pub program: String,
    /// The first sequence that it has not released.
    pub sequence: u64,
}

impl fmt::Display for ReaderPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({}) has not released sequence {}", self.pid, self.program, self.sequence)
    }
}

impl Member {
    /// The first sequence that it has not released, or `None` where it has gone.
    ///
    /// A reader can write anything into its counter. One that has released what was not published, or takes a release back, is
    /// dismissed.
    pub(super) fn position(&self) -> Option<u64> {
        match self.timeline.seen() {
            Seen::Live(released) if !self.is_dismissed() => match self.checked(released) {
                Ok(released) => Some(released.max(self.start)),
                Err(why) => {
                    let (pid, program) = (self.timeline.peer(), &self.program);
                    tracing::warn!(
                        pid,
                        program,
                        why,
                        "a reader of a ring breaks the rules, and is dismissed"
                    );
                    self.dismiss();
                    None
                }
            },
            _ => None,
        }
    }

    /// The counter, if it is one that an honest reader may have.
    fn checked(&self, released: u64) -> Result<u64, String> {
        // Looked at behind the counter: a publication is counted before any reader hears of it.
        let published = self.timeline.last_signalled();
        if released > published {
            return Err(format!(
                "its counter is {released}, and {published} is the last publication it was told of"
            ));
        }
        let highest = self.highest.fetch_max(released, Ordering::AcqRel);
        if released >= highest {
            return Ok(released);
        }
        // Another thread may have seen a later value.
        match self.timeline.seen() {
            Seen::Live(again) if again < highest => {
                Err(format!("its counter went back from {highest} to {again}"))
            }
            _ => Ok(highest),
        }
    }

    /// Does its word say that it has been told of everything before this sequence? The reader can write that word too.
    pub(super) fn has_been_told(&self, sequence: u64) -> bool {
        self.timeline.last_signalled() == sequence && self.timeline.has_arrived()
    }

    pub(super) fn is_dismissed(&self) -> bool {
        self.dismissed.load(Ordering::Acquire)
    }

    fn is_there(&self) -> bool {
        self.position().is_some()
    }

    /// Goes on without it: it is told before anything is written over, then streams that wait for it go on, and those of its
    /// own that wait for the writer.
    pub(super) fn dismiss(&self) {
        self.timeline.tell_dismissed();
        self.dismissed.store(true, Ordering::Release);
        self.timeline.ends().end(End::Released);
        if let Some(runtime) = Runtime::existing() {
            if self.timeline.ends().needs_poison() {
                runtime.poller.poison_again(Poison::Timeline(Arc::clone(self.timeline.ends())));
            }
            self.finish(runtime, 0);
        }
    }

    /// Ends its counter of publications once `least` has been signalled and has arrived.
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
    pub(super) fn new(own: Option<Arc<OwnCounter>>) -> Self {
        Self {
            own,
            state: Mutex::new(State { members: Vec::new(), next: 0, closed: false, told: InOrder::from(0) }),
            changed: Condvar::new(),
            version: AtomicU64::new(1),
        }
    }

    /// Copies the list into `known` where it has changed since `version`.
    pub(super) fn update(&self, known: &mut Vec<Arc<Member>>, version: &mut u64) {
        if self.version.load(Ordering::Acquire) == *version {
            return;
        }
        let mut state = self.lock();
        self.forget_the_gone(&mut state);
        known.clone_from(&state.members);
        *version = self.version.load(Ordering::Acquire);
    }

    /// Readers that join from now on begin behind this sequence; `false` where the list is no longer that of `version`, and
    /// somebody may have joined who is to be told.
    pub(super) fn advance(&self, published: u64, version: u64) -> bool {
        let mut state = self.lock();
        let unchanged = self.version.load(Ordering::Acquire) == version;
        if unchanged {
            state.next = published + 1;
        }
        unchanged
    }

    /// Tells everybody, as the host, that the bytes of a sequence are there; where those before it are too.
    pub(super) fn tell(&self, sequence: u64) {
        let mut state = self.lock();
        let told = state.told.done(sequence);
        for member in &state.members {
            if told > member.start {
                // It may have heard of it, or have gone.
                let _ = member.timeline.signal_now(told);
            }
        }
    }

    /// The first sequence whose bytes the host has not told of.
    pub(super) fn told(&self) -> u64 {
        self.lock().told.next()
    }

    /// Nothing more is published: readers are told, and their streams that wait for more go on once all has arrived.
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
        self.lock().members.iter().filter(|member| member.is_there()).count()
    }

    /// Waits until there are so many; else how many there were at the deadline.
    pub(super) fn wait(&self, count: usize, until: Instant) -> Result<(), usize> {
        let mut state = self.lock();
        loop {
            let found = state.members.iter().filter(|member| member.is_there()).count();
            if found >= count {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(found);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Those who have not released this sequence, the last first.
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

    /// The sequence whose slot the next publication takes, in a ring of so many slots.
    pub(super) fn next_to_be_released(&self, slots: u32) -> Option<u64> {
        self.lock().next.checked_sub(u64::from(slots))
    }

    /// Goes on without a reader. Was it one?
    pub(super) fn dismiss(&self, lease: LeaseId) -> bool {
        let mut state = self.lock();
        let Some(at) = state.members.iter().position(|member| member.lease == lease) else { return false };
        let member = state.members.remove(at);
        self.list_has_changed();
        drop(state);
        let was_there = member.is_there();
        member.dismiss();
        tracing::info!(
            pid = member.timeline.peer(),
            program = member.program,
            "a reader of a ring is dismissed"
        );
        was_there
    }

    fn forget_the_gone(&self, state: &mut State) {
        let before = state.members.len();
        state.members.retain(|member| member.is_there());
        if state.members.len() != before {
            self.list_has_changed();
        }
    }

    /// Called under the lock.
    fn list_has_changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TimelineObserver for Members {
    fn taken(&self, lease: LeaseId, holder: &Holder, timeline: &Timeline) {
        let mut state = self.lock();
        self.forget_the_gone(&mut state);
        let start = state.next;
        timeline.tell_start(start);
        let (program, timeline) = (holder.program.clone(), timeline.clone());
        let (dismissed, highest, own) = (AtomicBool::new(false), AtomicU64::new(0), self.own.clone());
        let member = Arc::new(Member { lease, program, start, timeline, dismissed, highest, own });
        state.members.push(Arc::clone(&member));
        self.list_has_changed();
        let closed = state.closed;
        drop(state);
        if closed {
            close_for(&member, start);
        }
        kill_point!("exporter:ring-joined");
    }
}

fn close_for(member: &Member, total: u64) {
    member.timeline.tell_total(total);
    if let Some(runtime) = Runtime::existing() {
        // Who joined behind the last publication has been signalled nothing.
        let least = if member.start < total { total } else { 0 };
        member.finish(runtime, least);
    }
}

/// Those who are behind, in words, for an error.
pub(super) fn in_words(behind: &[ReaderPosition]) -> String {
    const NAMED: usize = 8;
    let mut words: String = behind.iter().take(NAMED).map(|reader| format!("; {reader}")).collect();
    if behind.len() > NAMED {
        words += &format!("; and {} more", behind.len() - NAMED);
    }
    words
}
