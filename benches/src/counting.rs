//! A global allocator that counts the bytes of the process during a measurement.

#![allow(unsafe_code, reason = "an allocator that forwards to the system allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

use anyhow::Result;

/// The system allocator, which counts allocated bytes during a measurement.
pub(crate) struct CountingAllocator;

static ENABLED: AtomicBool = AtomicBool::new(false);
static ALLOCATED: AtomicIsize = AtomicIsize::new(0);

fn record(bytes: isize) {
    if ENABLED.load(Ordering::Relaxed) {
        ALLOCATED.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is forwarded to the system allocator with unchanged arguments.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record(layout.size() as isize);
        // SAFETY: the caller upholds the contract of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        record(-(layout.size() as isize));
        // SAFETY: the caller upholds the contract of this method.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        record(size as isize - layout.size() as isize);
        // SAFETY: the caller upholds the contract of this method.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Returns the bytes that remain allocated after the closure, divided by `count`.
pub(super) fn allocated_per_item(count: usize, create: impl FnOnce() -> Result<()>) -> Result<f64> {
    ENABLED.store(true, Ordering::Relaxed);
    let before = ALLOCATED.load(Ordering::Relaxed);
    let created = create();
    let after = ALLOCATED.load(Ordering::Relaxed);
    ENABLED.store(false, Ordering::Relaxed);
    created?;
    Ok((after - before) as f64 / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_is_not_counted() {
        let mut kept = Vec::with_capacity(16);
        let allocated = allocated_per_item(16, || {
            for _ in 0..16 {
                drop(vec![0_u8; 5_000_000]);
                kept.push(vec![0_u8; 1_000_000]);
            }
            Ok(())
        });
        let allocated = allocated.expect("the closure succeeds");
        // Concurrent tests allocate small amounts.
        assert!((0.9e6..1.1e6).contains(&allocated), "{allocated}");
    }
}
