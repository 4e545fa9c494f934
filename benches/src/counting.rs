//! What the process has allocated, counted where that is asked for.

#![allow(unsafe_code, reason = "an allocator that hands everything on to the system's")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

use anyhow::Result;

/// The system's allocator. While nobody measures, it counts nothing.
pub(crate) struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static HELD: AtomicIsize = AtomicIsize::new(0);

fn note(bytes: isize) {
    if ON.load(Ordering::Relaxed) {
        HELD.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is the system allocator's, with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size as isize - layout.size() as isize);
        // SAFETY: as the caller promised.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Bytes that each of `count` things holds after they have been made.
pub(super) fn held_by(count: usize, make: impl FnOnce() -> Result<()>) -> Result<f64> {
    ON.store(true, Ordering::Relaxed);
    let before = HELD.load(Ordering::Relaxed);
    let made = make();
    let after = HELD.load(Ordering::Relaxed);
    ON.store(false, Ordering::Relaxed);
    made?;
    Ok((after - before) as f64 / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_counted_and_what_is_freed_is_not() {
        let mut kept = Vec::with_capacity(16);
        let held = held_by(16, || {
            for _ in 0..16 {
                drop(vec![0_u8; 5_000_000]);
                kept.push(vec![0_u8; 1_000_000]);
            }
            Ok(())
        });
        let held = held.expect("nothing fails");
        // Other tests allocate a little beside this one.
        assert!((0.9e6..1.1e6).contains(&held), "{held}");
    }
}
