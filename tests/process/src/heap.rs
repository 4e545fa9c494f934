//! The memory on the heap, as counters: resident memory grows in steps of the allocator's choice, and does not show a leak of a few
//! bytes.

#![allow(unsafe_code, reason = "a global allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, counted. A program makes it its `#[global_allocator]`.
#[derive(Debug)]
pub struct CountingHeap;

static BLOCKS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static OF_THIS_THREAD: Cell<u64> = const { Cell::new(0) };
}

/// The memory that is allocated, on all threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heap {
    /// The number of allocations.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Heap {
    /// Returns what is allocated now.
    pub fn now() -> Self {
        Self { blocks: BLOCKS.load(Ordering::SeqCst), bytes: BYTES.load(Ordering::SeqCst) }
    }
}

/// Returns the number of allocations that this thread has made so far.
pub fn allocations_of_this_thread() -> u64 {
    OF_THIS_THREAD.with(Cell::get)
}

fn count(size: usize) {
    BYTES.fetch_add(size as u64, Ordering::Relaxed);
    // The counter of a thread that is exiting does not exist any more.
    let _ = OF_THIS_THREAD.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator with its arguments.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BLOCKS.fetch_add(1, Ordering::Relaxed);
        count(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        BLOCKS.fetch_add(1, Ordering::Relaxed);
        count(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BLOCKS.fetch_sub(1, Ordering::Relaxed);
        BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}
