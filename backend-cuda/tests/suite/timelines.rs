//! Words that streams write and wait on, also between two processes. Without a GPU with these operations, each test
//! reports it and passes.

use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crate::gpu::backend;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, DeviceStream, DeviceTimelines};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, Error, Timeline};
use device_ipc_cuda::CudaBackend;
use device_ipc_test_process::{Process, serve};
use rustix::fd::OwnedFd;
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
    file: OwnedFd,
    address: NonNull<u8>,
}

impl Page {
    fn create() -> Self {
        let file = memfd_create("words", MemfdFlags::empty()).unwrap();
        ftruncate(&file, LEN as u64).unwrap();
        Self::map(file)
    }

    fn map(file: OwnedFd) -> Self {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { mmap(ptr::null_mut(), LEN, protection, MapFlags::SHARED, &file, 0) }.unwrap();
        Self { file, address: NonNull::new(address.cast()).unwrap() }
    }

    /// Returns the path by which another process opens the page.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
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

fn wait(backend: &CudaBackend, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) {
    // SAFETY: as above.
    unsafe { backend.timelines().unwrap().wait_value(word, value, stream) }.unwrap();
}

/// Waits on the host until the word has the value, or fails after a timeout.
fn wait_until_equals(word: &AtomicU64, value: u64) {
    let begin = Instant::now();
    while word.load(Ordering::Acquire) != value {
        assert!(begin.elapsed() < SOON, "expected {value}, found {}", word.load(Ordering::Acquire));
        std::thread::yield_now();
    }
}

/// Returns whether the stream is idle.
fn is_idle(backend: &CudaBackend, stream: &dyn DeviceStream) -> bool {
    let event = backend.create_event(stream.as_borrowed().device()).unwrap();
    event.record(stream.as_borrowed()).unwrap();
    event.query().unwrap()
}

#[test]
fn stream_wait_makes_earlier_writes_visible() {
    let Some((backend, _alone)) = with_timelines() else { return };
    let page = Page::create();
    let words = page.register(&*backend, ZERO);
    let (writer, waiter) = (backend.create_stream(ZERO).unwrap(), backend.create_stream(ZERO).unwrap());
    let range = backend.allocate(ZERO, 1 << 20).unwrap();
    let copy = backend.allocate(ZERO, 1 << 20).unwrap();
    let mut bytes = vec![0; 1 << 20];
    for round in 1..=20u8 {
        wait(&backend, at(words, 1), u64::from(round), waiter.as_borrowed());
        // SAFETY: the memory is ours, and the words order the streams.
        unsafe {
            backend.copy(copy, range, waiter.as_borrowed()).unwrap();
            assert!(!is_idle(&backend, &*waiter), "round {round} does not wait");
            backend.fill(range, round, writer.as_borrowed()).unwrap();
            write(&backend, at(words, 1), u64::from(round), writer.as_borrowed());
            backend.read(copy, &mut bytes, waiter.as_borrowed()).unwrap();
        }
        assert!(bytes.iter().all(|byte| *byte == round), "round {round}");
    }
    assert_eq!(page.word(1).load(Ordering::Acquire), 20);
    // A value that was already written, and one that the host writes.
    wait(&backend, at(words, 1), 3, waiter.as_borrowed());
    backend.synchronize(waiter.as_borrowed()).unwrap();
    wait(&backend, at(words, 2), Timeline::END - 1, waiter.as_borrowed());
    page.word(2).store(Timeline::END - 2, Ordering::Release);
    assert!(!is_idle(&backend, &*waiter));
    page.word(2).store(Timeline::END, Ordering::Release);
    backend.synchronize(waiter.as_borrowed()).unwrap();
    page.unregister(&*backend, ZERO);
    // SAFETY: no longer used.
    unsafe {
        backend.free(range).unwrap();
        backend.free(copy).unwrap();
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

#[test]
fn devices_sharing_a_page_see_each_others_values() {
    let Some((backend, _alone)) = with_timelines() else { return };
    let last = backend.devices().unwrap().last().unwrap().ordinal;
    if last == ZERO || !backend.capabilities(last).unwrap().timelines {
        eprintln!("skipped: one device");
        return;
    }
    let page = Page::create();
    let (here, there) = (page.register(&*backend, ZERO), page.register(&*backend, last));
    let (ours, theirs) = (backend.create_stream(ZERO).unwrap(), backend.create_stream(last).unwrap());
    for value in 1..=50 {
        wait(&backend, at(there, 1), value, theirs.as_borrowed());
        write(&backend, at(there, 2), value, theirs.as_borrowed());
        write(&backend, at(here, 1), value, ours.as_borrowed());
        wait(&backend, at(here, 2), value, ours.as_borrowed());
    }
    backend.synchronize(ours.as_borrowed()).unwrap();
    backend.synchronize(theirs.as_borrowed()).unwrap();
    assert_eq!(page.word(2).load(Ordering::Acquire), 50);
    page.unregister(&*backend, last);
    page.unregister(&*backend, ZERO);
}

#[test]
fn processes_alternate_and_host_store_unblocks_survivor() {
    let Some((backend, _alone)) = with_timelines() else { return };
    let page = Page::create();
    let words = page.register(&*backend, ZERO);
    let stream = backend.create_stream(ZERO).unwrap();
    let mut other = Process::of_test(concat!(module_path!(), "::the_other_process"), &[]);
    assert_eq!(other.ask(&format!("open {}", page.path())), "open");
    let turns = 200;
    other.send(&format!("answer {turns}"));
    for turn in 1..=turns {
        write(&backend, at(words, 1), turn, stream.as_borrowed());
        wait(&backend, at(words, 2), turn, stream.as_borrowed());
    }
    assert_eq!(other.receive(), "answered");
    backend.synchronize(stream.as_borrowed()).unwrap();
    assert_eq!(page.word(2).load(Ordering::Acquire), turns);

    // Its stream and ours wait for each other when it is killed.
    assert_eq!(other.ask("wait 1000"), "waits");
    wait(&backend, at(words, 2), turns + 1, stream.as_borrowed());
    other.kill();
    assert!(!is_idle(&backend, &*stream), "the value is not written yet");
    page.word(2).store(Timeline::END, Ordering::Release);
    backend.synchronize(stream.as_borrowed()).unwrap();
    page.unregister(&*backend, ZERO);
}

#[test]
#[ignore = "the child of the other tests"]
fn the_other_process() {
    let backend = CudaBackend::load().unwrap();
    let stream = backend.create_stream(ZERO).unwrap();
    let mut page = None;
    serve(|request, argument| match request {
        "open" => {
            let file = std::fs::File::options().read(true).write(true).open(argument).unwrap();
            let mapped = Page::map(file.into());
            let words = mapped.register(&*backend, ZERO);
            page = Some((mapped, words));
            "open".to_owned()
        }
        "answer" => {
            let (_, words) = page.as_ref().unwrap();
            for turn in 1..=argument.parse().unwrap() {
                wait(&backend, at(*words, 1), turn, stream.as_borrowed());
                write(&backend, at(*words, 2), turn, stream.as_borrowed());
            }
            backend.synchronize(stream.as_borrowed()).unwrap();
            "answered".to_owned()
        }
        _ => {
            let (_, words) = page.as_ref().unwrap();
            wait(&backend, at(*words, 1), argument.parse().unwrap(), stream.as_borrowed());
            "waits".to_owned()
        }
    });
}
