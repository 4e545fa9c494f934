//! What the cache does for one thread after the other; in any order, `cache_loom` does.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::model::error::Error;

struct Thing {
    bytes: u64,
    kept: AtomicBool,
}

impl Cached for Thing {
    fn may_be_kept(&self) -> bool {
        self.kept.load(Ordering::SeqCst)
    }
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn thing(bytes: u64) -> Thing {
    Thing { bytes, kept: AtomicBool::new(true) }
}

fn deadline() -> Deadline {
    Deadline::after(Duration::from_secs(10))
}

fn counts(cache: &Cache<i32, Thing>) -> (usize, usize) {
    (cache.live().len(), cache.idle().len())
}

fn never<K>(_: &Arc<CacheEntry<K, Thing>>) {
    panic!("it is not to be closed");
}

fn close_idle<K: Eq + Hash>(cache: &Cache<K, Thing>, key: &K, close: impl FnMut(&Arc<CacheEntry<K, Thing>>)) {
    let known = cache.lock().get(key);
    if let Some(known) = known {
        cache.close_idle(&known, close);
    }
}

fn idle_keys(cache: &Cache<i32, Thing>) -> Vec<i32> {
    cache.idle().iter().map(|idle| *idle.key()).collect()
}

#[test]
fn idle_value_stays_open_and_is_reused() {
    let cache = Cache::default();
    let (first, was_open) = cache.acquire(1, deadline(), |_| Ok(thing(10)), never).unwrap();
    assert!(!was_open);
    let (second, was_open) = cache.acquire(1, deadline(), |_| panic!("it is open"), never).unwrap();
    assert!(was_open);
    cache.release(first, never);
    cache.release(second, never);
    assert_eq!(counts(&cache), (0, 1));
    let (again, was_open) = cache.acquire(1, deadline(), |_| panic!("it is open"), never).unwrap();
    assert!(was_open);
    assert_eq!(counts(&cache), (1, 0));
    cache.release(again, never);
    let mut closed = 0;
    close_idle(&cache, &1, |_| closed += 1);
    close_idle(&cache, &1, |_| closed += 1);
    assert_eq!((closed, counts(&cache)), (1, (0, 0)));
}

#[test]
fn open_value_is_referenced_without_side_effects() {
    let cache = Cache::default();
    assert!(cache.acquire_open(&1, |_: &Thing| true).is_none(), "it is not open");
    let (held, _) = cache.acquire(1, deadline(), |_| Ok(thing(10)), never).unwrap();
    assert!(cache.acquire_open(&1, |_| false).is_none(), "it is not usable");
    let second = cache.acquire_open(&1, |_| true).unwrap();
    cache.release(held, never);
    assert_eq!(counts(&cache), (1, 0), "the second hold counts");
    cache.release(second, never);
    let again = cache.acquire_open(&1, |_| true).unwrap();
    assert_eq!(counts(&cache), (1, 0), "an idle one is used again");
    cache.release(Arc::clone(&again), never);
    again.kept.store(false, Ordering::SeqCst);
    assert!(cache.acquire_open(&1, |_| true).is_none(), "it was revoked while it was idle");
    let closed = AtomicUsize::new(0);
    close_idle(&cache, &1, |_| {
        closed.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(closed.into_inner(), 1, "it was left to be closed");
}

#[test]
fn shared_value_is_referenced_and_released_without_the_table() {
    let cache = Cache::default();
    let (held, _) = cache.acquire(1, deadline(), |_| Ok(thing(10)), never).unwrap();
    assert!(cache.acquire_known(Arc::clone(&held), |_| false).is_none(), "it is not usable");
    let (done, finished) = std::sync::mpsc::channel();
    let table = cache.lock();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let again = cache.acquire_known(Arc::clone(&held), |_| true).unwrap();
            assert!(cache.leave_idle(again).is_ok());
            done.send(()).unwrap();
        });
        let waited = finished.recv_timeout(Duration::from_secs(10));
        drop(table);
        waited.expect("it waited for the table");
    });
    assert!(cache.leave_idle(Arc::clone(&held)).is_ok());
    assert_eq!(counts(&cache), (0, 1), "the last of them has gone");
    assert!(cache.acquire_known(Arc::clone(&held), |_| true).is_some());
    assert_eq!((counts(&cache), cache.taken_again()), ((1, 0), 2), "an idle one is used again");
    assert!(cache.leave_idle(Arc::clone(&held)).is_ok());
    held.kept.store(false, Ordering::SeqCst);
    assert!(cache.acquire_known(Arc::clone(&held), |_| true).is_none(), "it was revoked while it was idle");
    close_idle(&cache, &1, |_| {});
    assert!(cache.acquire_known(held, |_| true).is_none(), "it was closed");
    assert_eq!(cache.taken_again(), 2);
}

#[test]
fn reference_is_released_if_nothing_has_to_be_closed() {
    let cache = Cache::default();
    cache.set_limits(CacheLimits { mappings: 1, bytes: 100 }, never);
    let hold = |key: i32, bytes| cache.acquire(key, deadline(), |_| Ok(thing(bytes)), never).unwrap().0;
    let (first, second) = (hold(1, 60), hold(1, 60));
    first.kept.store(false, Ordering::SeqCst);
    assert!(cache.leave_idle(first).is_ok(), "another hold is left");
    let revoked = cache.leave_idle(second).unwrap_err();
    assert_eq!(counts(&cache), (1, 0), "the last hold on what may not be kept is given back");
    revoked.kept.store(true, Ordering::SeqCst);
    assert!(cache.leave_idle(revoked).is_ok());
    assert_eq!(counts(&cache), (0, 1), "it stays open");
    let other = cache.leave_idle(hold(2, 10)).unwrap_err();
    assert_eq!(counts(&cache), (1, 1), "there is room for one");
    cache.set_limits(CacheLimits { mappings: 2, bytes: 69 }, never);
    let other = cache.leave_idle(other).unwrap_err();
    cache.set_limits(CacheLimits { mappings: 2, bytes: 70 }, never);
    assert!(cache.leave_idle(other).is_ok(), "there is room for its bytes");
    assert_eq!(counts(&cache), (0, 2));
}

#[test]
fn busy_value_is_reused_rather_than_closed() {
    struct Busy(AtomicBool);
    impl Cached for Busy {
        fn may_be_kept(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
        fn bytes(&self) -> u64 {
            1
        }
        fn is_busy(&self) -> bool {
            true
        }
    }
    let close = |_: &Arc<CacheEntry<i32, Busy>>| panic!("it is not to be closed");
    let cache = Cache::default();
    let (held, _) = cache.acquire(1, deadline(), |_| Ok(Busy(AtomicBool::new(true))), close).unwrap();
    assert!(cache.leave_idle(Arc::clone(&held)).is_ok());
    held.0.store(false, Ordering::SeqCst);
    assert!(cache.acquire(1, deadline(), |_| panic!("it is open"), close).unwrap().1);
    assert!(cache.leave_idle(held).is_err(), "it may still not be kept");
}

#[test]
fn least_recently_used_idle_value_is_closed_first() {
    let cache = Cache::default();
    cache.set_limits(CacheLimits { mappings: 2, bytes: 100 }, never);
    let mut closed = Vec::new();
    let hold = |key: i32, bytes| cache.acquire(key, deadline(), |_| Ok(thing(bytes)), never).unwrap().0;
    let used = hold(0, 90);
    for key in 1..=3 {
        cache.release(hold(key, 30), |one| closed.push(one.bytes));
    }
    assert_eq!((closed.len(), counts(&cache)), (1, (1, 2)), "by number");
    let mut keys = idle_keys(&cache);
    keys.sort_unstable();
    assert_eq!(keys, [2, 3], "the one that was used first has gone");
    cache.release(hold(4, 80), |one| closed.push(one.bytes));
    assert_eq!((closed.len(), idle_keys(&cache)), (3, vec![4]), "by bytes");
    cache.release(used, |one| closed.push(one.bytes));
    assert_eq!(idle_keys(&cache), [0], "what was let go last is kept");
    cache.set_limits(CacheLimits::NONE, |one| closed.push(one.bytes));
    assert_eq!((closed.len(), counts(&cache)), (5, (0, 0)));
}

#[test]
fn revoked_value_in_use_is_closed_after_its_release() {
    let cache = Cache::default();
    let (held, _) = cache.acquire(1, deadline(), |_| Ok(thing(1)), never).unwrap();
    held.kept.store(false, Ordering::SeqCst);
    let mut closed = 0;
    close_idle(&cache, &1, |_| closed += 1);
    assert_eq!(closed, 0, "it is in use");
    cache.release(held, |_| closed += 1);
    assert_eq!((closed, counts(&cache)), (1, (0, 0)));
}

#[test]
fn revoked_idle_value_is_closed_before_it_is_reopened() {
    let cache = Cache::default();
    let (held, _) = cache.acquire(1, deadline(), |_| Ok(thing(1)), never).unwrap();
    let revoke = Arc::clone(&held);
    cache.release(held, never);
    revoke.kept.store(false, Ordering::SeqCst);
    drop(revoke);
    let closed = AtomicUsize::new(0);
    let open = |_: &Arc<CacheEntry<i32, Thing>>| {
        assert_eq!(closed.load(Ordering::SeqCst), 1);
        Ok(thing(2))
    };
    let (again, was_open) = cache
        .acquire(1, deadline(), open, |_| {
            closed.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    assert_eq!((again.bytes, was_open), (2, false));
}

#[test]
fn failed_open_leaves_no_entry() {
    let cache = Cache::<i32, Thing>::default();
    let failed = cache.acquire(1, deadline(), |_| Err(Error::Rebooted), never);
    assert!(matches!(failed, Err(Error::Rebooted)));
    let panicked = std::panic::catch_unwind(|| {
        cache.acquire(1, deadline(), |_| panic!("part of the test"), never).is_ok()
    });
    assert!(panicked.is_err());
    cache.acquire(1, deadline(), |_| Ok(thing(0)), never).unwrap();
}

#[test]
fn open_waits_for_another_thread_until_its_deadline() {
    let cache = Cache::default();
    let open = |_: &Arc<CacheEntry<i32, Thing>>| {
        let soon = Deadline::after(Duration::from_millis(1));
        assert!(matches!(cache.acquire(1, soon, |_| Ok(thing(0)), never), Err(Error::Timeout { .. })));
        Ok(thing(0))
    };
    cache.acquire(1, deadline(), open, never).unwrap();
}

#[test]
fn many_threads_never_have_two_open_at_a_time() {
    let cache = Cache::default();
    let open = AtomicUsize::new(0);
    let close = |_: &Arc<CacheEntry<(), Thing>>| assert_eq!(open.fetch_sub(1, Ordering::SeqCst), 1);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (cache, open) = (&cache, &open);
            scope.spawn(move || {
                let mut known: Option<Arc<CacheEntry<(), Thing>>> = None;
                for round in 0..500 {
                    if let Some(held) = known.take().and_then(|known| cache.acquire_known(known, |_| true)) {
                        assert_eq!(open.load(Ordering::SeqCst), 1);
                        cache.release(held, close);
                    }
                    let acquired = cache.acquire(
                        (),
                        deadline(),
                        |_| {
                            assert_eq!(open.fetch_add(1, Ordering::SeqCst), 0);
                            Ok(thing(1))
                        },
                        close,
                    );
                    let held = acquired.unwrap().0;
                    known = Some(Arc::clone(&held));
                    held.kept.store((round + thread) % 3 != 0, Ordering::SeqCst);
                    cache.release(held, close);
                    if round % 7 == 0 {
                        close_idle(cache, &(), close);
                    }
                }
            });
        }
    });
    close_idle(&cache, &(), close);
    assert_eq!(open.load(Ordering::SeqCst), 0);
}
