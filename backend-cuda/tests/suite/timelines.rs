//! The registration of words that streams write and wait on, which CUDA counts for each device. The conformance suite tests the words
//! themselves. Without a GPU with these operations, each test reports it and passes.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crate::gpu::backend;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, DeviceTimelines};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, Error};
use device_ipc_cuda::CudaBackend;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const SOON: Duration = Duration::from_secs(20);
const LEN: usize = 64 * 1024;

fn with_timelines() -> Option<(Arc<CudaBackend>, MutexGuard<'static, ()>)> {
    let (backend, alone) = backend()?;
    if backend.capabilities(ZERO).unwrap().timelines {
        return Some((backend, alone));
    }
    eprintln!("skipped: the device has no 64-bit stream memory operations");
    None
}

/// A page of words in a memory file.
struct Page {
    address: NonNull<u8>,
}

impl Page {
    fn create() -> Self {
        let file = memfd_create("words", MemfdFlags::empty()).unwrap();
        ftruncate(&file, LEN as u64).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { mmap(ptr::null_mut(), LEN, protection, MapFlags::SHARED, &file, 0) }.unwrap();
        Self { address: NonNull::new(address.cast()).unwrap() }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping, aligned, and accessed atomically only.
        unsafe { AtomicU64::from_ptr(self.address.byte_add(index * 64).cast().as_ptr()) }
    }

    fn register(&self, timelines: &dyn DeviceTimelines, device: DeviceOrdinal) -> DevicePtr {
        // SAFETY: the tests unregister the page before it is dropped, or exit with it.
        unsafe { timelines.register(device, self.address, LEN) }.unwrap()
    }

    fn unregister(&self, timelines: &dyn DeviceTimelines, device: DeviceOrdinal) {
        // SAFETY: the tests wait for their streams before.
        unsafe { timelines.unregister(device, self.address) }.unwrap();
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no longer used.
        unsafe { munmap(self.address.as_ptr().cast(), LEN) }.unwrap();
    }
}

fn at(page: DevicePtr, index: u64) -> DevicePtr {
    page.checked_add(index * 64).unwrap()
}

fn write(backend: &CudaBackend, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) {
    // SAFETY: the word is registered until the stream has executed the operation.
    unsafe { backend.timelines().unwrap().write_value(word, value, stream) }.unwrap();
}

/// Waits on the host until the word has the value, or fails after a timeout.
fn wait_until_equals(word: &AtomicU64, value: u64) {
    let begin = Instant::now();
    while word.load(Ordering::Acquire) != value {
        assert!(begin.elapsed() < SOON, "expected {value}, found {}", word.load(Ordering::Acquire));
        std::thread::yield_now();
    }
}

#[test]
fn registrations_are_counted_across_devices() {
    let Some((backend, _alone)) = with_timelines() else { return };
    let page = Page::create();
    let last = backend.devices().unwrap().last().unwrap().ordinal;
    let first = page.register(&*backend, ZERO);
    assert_eq!(page.register(&*backend, ZERO), first);
    page.register(&*backend, last);
    page.unregister(&*backend, ZERO);
    page.unregister(&*backend, ZERO);
    // SAFETY: refused.
    let error = unsafe { backend.unregister(DeviceOrdinal::new(1000), page.address) }.unwrap_err();
    assert!(error.to_string().contains("are registered for device 1000"), "{error}");
    // The remaining registration suffices.
    let again = page.register(&*backend, last);
    page.unregister(&*backend, last);
    let stream = backend.create_stream(last).unwrap();
    write(&backend, at(again, 3), 5, stream.as_borrowed());
    wait_until_equals(page.word(3), 5);
    backend.synchronize(stream.as_borrowed()).unwrap();
    page.unregister(&*backend, last);
    // SAFETY: refused.
    let error = unsafe { backend.unregister(last, page.address) }.unwrap_err();
    assert!(matches!(error, Error::InvalidRegion(_)), "{error}");
    // Registers again after the last use.
    page.register(&*backend, ZERO);
    page.unregister(&*backend, ZERO);
}

#[test]
fn longer_registration_of_same_pages_is_rejected() {
    let Some((backend, _alone)) = with_timelines() else { return };
    let page = Page::create();
    page.register(&*backend, ZERO);
    // SAFETY: refused.
    let error = unsafe { backend.register(ZERO, page.address, 2 * LEN) }.unwrap_err();
    assert!(error.to_string().contains("65536 bytes are already registered"), "{error}");
    // SAFETY: refused.
    let error = unsafe { backend.register(DeviceOrdinal::new(1000), page.address, LEN) }.unwrap_err();
    assert!(matches!(error, Error::NoSuchDevice { .. }), "{error}");
    page.unregister(&*backend, ZERO);
}
