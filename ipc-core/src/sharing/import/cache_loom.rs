//! Model of the cache: its states under all thread interleavings up to loom's preemption bound.
//!
//! Compiled with `--cfg loom` only; the filter `loom` selects these tests.
//!
//! ```console
//! LOOM_MAX_PREEMPTIONS=3 RUSTFLAGS="--cfg loom" cargo test --package device-ipc-core --profile model-checker --lib loom
//! ```
//!
//! Under loom the cache waits without a timeout, so a lost wake-up is a deadlock, which loom reports.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use loom::thread;

use super::cache::{Cache, CacheEntry, CacheLimits, Cached};
use crate::model::error::{Error, Result};
use crate::sharing::lease_page;
use crate::transport::Deadline;

type Key = u8;

/// An opened value that may be revoked.
struct LoomThing {
    key: Key,
    kept: AtomicBool,
    closed: AtomicBool,
    /// Whether the driver has it mapped. A reference to a value that is not mapped finds it unmapped, as in the table of the
    /// driver's mappings.
    mapped: Mutex<bool>,
    /// The numbers of references taken, and of uses completed. They impose no order: the cache must order all of them before
    /// the close.
    came: AtomicUsize,
    done: AtomicUsize,
    /// The state that the exporter sees; the exporter may end an idle lease.
    state: AtomicU32,
    reclaimed: AtomicBool,
}

type EntryRef = Arc<CacheEntry<Key, LoomThing>>;

impl Cached for LoomThing {
    fn may_be_kept(&self) -> bool {
        self.kept.load(Ordering::Acquire)
    }

    fn bytes(&self) -> u64 {
        1
    }

    fn rest(&self) {
        lease_page::rest(&self.state, true);
    }

    fn resume(&self) -> bool {
        lease_page::resume(&self.state).is_some()
    }
}

/// The cache, and the calls that the vendor would receive. The counters are loom's, so that other threads may run during an
/// open and a close.
struct World {
    cache: Cache<Key, LoomThing>,
    alive: [AtomicUsize; 2],
    opened: AtomicUsize,
    closed: AtomicUsize,
}

impl World {
    fn new(limits: CacheLimits) -> Arc<Self> {
        let world = Self {
            cache: Cache::default(),
            alive: [AtomicUsize::new(0), AtomicUsize::new(0)],
            opened: AtomicUsize::new(0),
            closed: AtomicUsize::new(0),
        };
        world.cache.set_limits(limits, |_| panic!("there is nothing to close"));
        Arc::new(world)
    }

    fn open(&self, key: Key) -> LoomThing {
        let before = self.alive[usize::from(key)].fetch_add(1, Ordering::AcqRel);
        assert_eq!(before, 0, "two of one key are open at a time");
        self.opened.fetch_add(1, Ordering::Relaxed);
        LoomThing {
            key,
            kept: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            mapped: Mutex::new(true),
            came: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            state: AtomicU32::new(0),
            reclaimed: AtomicBool::new(false),
        }
    }

    fn close(&self, thing: &LoomThing) {
        assert!(!thing.closed.swap(true, Ordering::AcqRel), "it is closed a second time");
        self.closed.fetch_add(1, Ordering::Relaxed);
        let (came, done) = (thing.came.load(Ordering::Relaxed), thing.done.load(Ordering::Relaxed));
        assert_eq!(came, done, "it is closed before those who held it are done with it");
        self.unmap(thing);
    }

    fn unmap(&self, thing: &LoomThing) {
        let mut mapped = thing.mapped.lock().unwrap();
        if std::mem::take(&mut *mapped) {
            let before = self.alive[usize::from(thing.key)].fetch_sub(1, Ordering::AcqRel);
            assert_eq!(before, 1, "it was closed, but not open");
        }
    }

    fn try_acquire(&self, key: Key, open: impl FnOnce() -> Result<LoomThing>) -> Result<EntryRef> {
        let deadline = Deadline::after(Duration::from_secs(24 * 3600));
        let (held, _) = self.cache.acquire(key, deadline, |_| open(), |thing| self.close(thing))?;
        assert_eq!(held.key, key);
        Ok(self.came(held))
    }

    fn acquire(&self, key: Key) -> EntryRef {
        self.try_acquire(key, || Ok(self.open(key))).expect("the open succeeds, and the deadline is far away")
    }

    /// Opens as a thread with a remembered entry does.
    fn acquire_known(&self, known: &EntryRef) -> Option<EntryRef> {
        let held = self.cache.acquire_known(Arc::clone(known), |thing| thing.may_be_kept())?;
        Some(self.came(held))
    }

    fn came(&self, held: EntryRef) -> EntryRef {
        assert!(!held.closed.load(Ordering::Acquire), "a closed one was handed out");
        assert!(!held.reclaimed.load(Ordering::Acquire), "a reclaimed one was handed out");
        held.came.fetch_add(1, Ordering::Relaxed);
        held
    }

    fn done(&self, held: &EntryRef) {
        assert!(!held.closed.load(Ordering::Acquire), "it was closed while it was in use");
        assert!(!held.reclaimed.load(Ordering::Acquire), "it was reclaimed while it was in use");
        held.done.fetch_add(1, Ordering::Relaxed);
    }

    fn release(&self, held: EntryRef) {
        self.done(&held);
        self.release_done(held);
    }

    fn release_done(&self, held: EntryRef) {
        self.cache.release(held, |thing| self.close(thing));
    }

    /// Releases as the end of a mapping does: the close is left to another thread, here the same one.
    fn leave_idle(&self, held: EntryRef) {
        self.done(&held);
        if let Err(last) = self.cache.leave_idle(held) {
            self.release_done(last);
        }
    }

    fn use_once(&self, key: Key) {
        let held = self.acquire(key);
        self.release(held);
    }

    /// Revokes as the link does: first the property, then the close of idle values.
    fn revoke(&self, held: &EntryRef) {
        held.kept.store(false, Ordering::Release);
        self.cache.close_idle(held, |thing| self.close(thing));
    }

    /// Reclaims as the exporter does, which frees the memory then, without the importer's cache.
    fn reclaim(held: &EntryRef) {
        if lease_page::reclaim(&held.state) {
            assert!(!held.reclaimed.swap(true, Ordering::AcqRel), "it was reclaimed a second time");
            let (came, done) = (held.came.load(Ordering::Relaxed), held.done.load(Ordering::Relaxed));
            assert_eq!(came, done, "it was reclaimed before those who held it were done with it");
        }
    }

    /// Closes by force as after an exporter's termination: values in use are unmapped, and the last reference closes them.
    fn close_by_force(&self) {
        for held in self.cache.open() {
            self.revoke(&held);
            self.unmap(&held);
        }
    }

    fn close_idle(&self, key: Key) {
        let known = self.cache.idle().into_iter().find(|idle| idle.key == key);
        if let Some(known) = known {
            self.cache.close_idle(&known, |thing| self.close(thing));
        }
    }

    /// The state after all threads have ended: nothing is in use, nothing was lost, and idle values can be closed.
    fn finish(&self, kept_at_most: usize) {
        let kept: Vec<Key> = self.cache.idle().iter().map(|idle| idle.key).collect();
        assert!(self.cache.live().is_empty(), "somebody still holds it");
        assert!(kept.len() <= kept_at_most, "{} are kept, not {kept_at_most}", kept.len());
        assert!(self.cache.open().iter().all(|open| open.may_be_kept()), "a revoked one is kept");
        let (opened, closed) = (self.opened.load(Ordering::Acquire), self.closed.load(Ordering::Acquire));
        assert_eq!(opened, closed + kept.len(), "one was lost");
        kept.into_iter().for_each(|key| self.close_idle(key));
        assert_eq!(self.closed.load(Ordering::Acquire), opened);
        assert_eq!(self.alive.each_ref().map(|alive| alive.load(Ordering::Acquire)), [0, 0]);
    }
}

fn limits(mappings: usize) -> CacheLimits {
    CacheLimits { mappings, bytes: u64::MAX }
}

/// Runs the threads in all interleavings.
fn model(limits: CacheLimits, kept_at_most: usize, threads: &'static [fn(&World)]) {
    loom::model(move || {
        let world = World::new(limits);
        let others: Vec<_> = threads[1..]
            .iter()
            .map(|other| {
                let world = Arc::clone(&world);
                thread::spawn(move || other(&world))
            })
            .collect();
        threads[0](&world);
        others.into_iter().for_each(|other| other.join().unwrap());
        world.finish(kept_at_most);
    });
}

/// Runs the threads with an open value, which the first thread uses and all threads know.
fn model_known(limits: CacheLimits, kept_at_most: usize, threads: &'static [fn(&World, EntryRef)]) {
    loom::model(move || {
        let world = World::new(limits);
        let first = world.acquire(0);
        let others: Vec<_> = threads[1..]
            .iter()
            .map(|other| {
                let (world, known) = (Arc::clone(&world), Arc::clone(&first));
                thread::spawn(move || other(&world, known))
            })
            .collect();
        threads[0](&world, first);
        others.into_iter().for_each(|other| other.join().unwrap());
        world.finish(kept_at_most);
    });
}

fn let_it_go(world: &World, first: EntryRef) {
    world.leave_idle(first);
}

fn release_it(world: &World, first: EntryRef) {
    world.release(first);
}

fn revoke_and_let_it_go(world: &World, first: EntryRef) {
    world.revoke(&first);
    world.leave_idle(first);
}

fn use_what_is_known(world: &World, known: EntryRef) {
    if let Some(held) = world.acquire_known(&known) {
        world.leave_idle(held);
    }
}

fn use_what_is_known_twice(world: &World, known: EntryRef) {
    use_what_is_known(world, Arc::clone(&known));
    use_what_is_known(world, known);
}

/// Opens as the library does: by the table if the known entry cannot be used.
fn use_what_is_known_or_another(world: &World, known: EntryRef) {
    let held = world.acquire_known(&known).unwrap_or_else(|| world.acquire(0));
    world.leave_idle(held);
}

fn revoke_what_is_known(world: &World, known: EntryRef) {
    world.revoke(&known);
}

fn reclaim_it(_: &World, known: EntryRef) {
    World::reclaim(&known);
}

fn reclaim_it_twice(_: &World, known: EntryRef) {
    World::reclaim(&known);
    World::reclaim(&known);
}

fn close_by_force(world: &World, _: EntryRef) {
    world.close_by_force();
}

fn close_if_idle(world: &World, _: EntryRef) {
    world.close_idle(0);
}

fn keep_nothing(world: &World, _: EntryRef) {
    keep_nothing_from_now_on(world);
}

fn use_it(world: &World) {
    world.use_once(0);
}

fn use_it_and_let_go(world: &World) {
    let held = world.acquire(0);
    world.leave_idle(held);
}

fn revoke_it_and_let_go(world: &World) {
    let held = world.acquire(0);
    world.revoke(&held);
    world.leave_idle(held);
}

fn use_it_twice(world: &World) {
    world.use_once(0);
    world.use_once(0);
}

fn use_the_other(world: &World) {
    world.use_once(1);
}

fn use_and_revoke(world: &World) {
    let held = world.acquire(0);
    world.revoke(&held);
    world.release(held);
}

fn use_and_revoke_afterwards(world: &World) {
    let held = world.acquire(0);
    let again = Arc::clone(&held);
    world.release(held);
    world.revoke(&again);
}

fn close_what_is_idle(world: &World) {
    world.close_idle(0);
}

fn fail_to_open(world: &World) {
    // If another thread's value is open already, it is used.
    match world.try_acquire(0, || Err(Error::Rebooted)) {
        Ok(held) => world.release(held),
        Err(error) => assert!(matches!(error, Error::Rebooted)),
    }
}

fn keep_nothing_from_now_on(world: &World) {
    world.cache.set_limits(limits(0), |thing| world.close(thing));
}

#[test]
fn two_threads_share_one() {
    model(limits(1), 1, &[use_it, use_it_twice]);
}

#[test]
fn value_revoked_in_use_is_closed_by_the_last_reference() {
    model(limits(1), 1, &[use_and_revoke, use_it_twice]);
}

#[test]
fn value_revoked_while_idle_is_closed_once() {
    model(limits(1), 1, &[use_and_revoke_afterwards, use_it_twice]);
}

#[test]
fn value_revoked_during_its_release_is_closed_once() {
    model(limits(1), 1, &[use_and_revoke, use_it_and_let_go]);
    model(limits(1), 1, &[revoke_it_and_let_go, use_it_and_let_go]);
    model(limits(1), 1, &[use_it_and_let_go, use_and_revoke_afterwards]);
}

#[test]
fn released_values_keep_the_limits() {
    model(limits(0), 0, &[use_it_and_let_go, use_it, close_what_is_idle]);
    model(limits(1), 0, &[keep_nothing_from_now_on, use_it_and_let_go, use_the_other]);
}

#[test]
fn three_threads_use_revoke_and_close() {
    model(limits(1), 1, &[use_and_revoke, use_it, close_what_is_idle]);
}

#[test]
fn three_threads_use_it_and_keep_nothing() {
    model(limits(0), 0, &[use_it, use_it, close_what_is_idle]);
}

#[test]
fn threads_that_wait_for_a_failed_open_open_it_themselves() {
    model(limits(1), 1, &[use_it, fail_to_open, use_it]);
}

#[test]
fn limit_holds_for_two_keys() {
    model(limits(1), 1, &[use_it, use_the_other, close_what_is_idle]);
}

#[test]
fn limits_that_shrink_while_it_is_used_hold_at_the_end() {
    model(limits(1), 0, &[keep_nothing_from_now_on, use_it, use_the_other]);
}

#[test]
fn threads_that_know_it_share_it_with_each_other() {
    model_known(limits(1), 1, &[let_it_go, use_what_is_known, use_what_is_known]);
    model_known(limits(1), 1, &[release_it, use_what_is_known_twice]);
    model_known(limits(1), 1, &[let_it_go, use_what_is_known_or_another]);
}

#[test]
fn known_entry_is_not_used_while_it_is_closed() {
    model_known(limits(0), 0, &[let_it_go, use_what_is_known, use_what_is_known]);
    model_known(limits(1), 1, &[let_it_go, use_what_is_known_twice, close_if_idle]);
    model_known(limits(1), 0, &[let_it_go, use_what_is_known, keep_nothing]);
    model_known(limits(0), 0, &[release_it, use_what_is_known_or_another]);
}

#[test]
fn known_revoked_entry_is_closed_once() {
    model_known(limits(1), 1, &[let_it_go, use_what_is_known, revoke_what_is_known]);
    model_known(limits(1), 1, &[revoke_and_let_it_go, use_what_is_known_or_another]);
}

#[test]
fn known_entry_closed_by_force_is_unmapped_once() {
    model_known(limits(1), 1, &[let_it_go, use_what_is_known, close_by_force]);
    model_known(limits(1), 1, &[release_it, use_what_is_known_or_another, close_by_force]);
}

#[test]
fn idle_value_is_either_reused_or_reclaimed() {
    model_known(limits(1), 1, &[let_it_go, use_what_is_known_or_another, reclaim_it]);
    model_known(limits(1), 1, &[let_it_go, use_what_is_known_twice, reclaim_it]);
    model_known(limits(1), 1, &[release_it, use_what_is_known, reclaim_it_twice]);
    model_known(limits(1), 1, &[let_it_go, reclaim_it, close_if_idle]);
    model_known(limits(0), 0, &[let_it_go, use_what_is_known_or_another, reclaim_it]);
}
