//! Whether words work on a device: the attributes are asked, and then it is tried.

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use device_ipc_core::{DeviceOrdinal, DevicePtr, Error, Result, TIMELINE_END};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{address_of, unsupported};
use crate::api::{STREAM_WAIT_VALUE_GEQ, STREAM_WRITE_VALUE_DEFAULT, Stream};
use crate::driver::Driver;
use crate::status::number;
use crate::stream::CudaOwnStream;

/// Whole pages on every machine that has CUDA (64 KiB on some).
const BYTES: usize = 64 * 1024;
/// How long a word may take: a device that is busy with the work of others comes back sooner.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_micros(20);

/// Has a stream wait for one word and answer in another, twice. The device's context is current.
pub(super) fn try_once(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<()> {
    let operations = driver.value_operations()?;
    let mut able: c_int = 0;
    // SAFETY: writes one int; an attribute that the driver does not know is an error.
    let status = unsafe {
        (driver.api.device_get_attribute)(&raw mut able, operations.attribute, driver.device(device)?.handle)
    };
    driver.check("cuDeviceGetAttribute", status)?;
    if able == 0 {
        return Err(unsupported("write and wait on words"));
    }
    let stream = CudaOwnStream::create(driver, device)?;
    let page = Page::map()?;
    let table = driver.registered.lock_settled(address_of(page.0));
    // SAFETY: shared memory, which stays mapped until it has been unregistered below.
    let words = unsafe { driver.register(table, device, page.0, BYTES) }?;
    let raw = stream.raw();

    let answered = converse(driver, &page, words, raw);
    page.asked().store(TIMELINE_END, Ordering::Release);
    // SAFETY: the stream is ours.
    let idle = || unsafe { (driver.api.stream_query)(raw) } == number::SUCCESS;
    if !comes_true(idle) {
        // The device may still look at the words.
        std::mem::forget(page);
        return answered.and(Err(silent("did not come to the end of its stream")));
    }
    // SAFETY: the stream has finished, and nobody else knows the pages.
    answered.and(unsafe { driver.unregister(device, page.0) })
}

fn converse(driver: &Driver, page: &Page, words: DevicePtr, stream: Stream) -> Result<()> {
    let operations = driver.value_operations()?;
    let (asked, answer) = (words.get() + Page::ASKED, words.get() + Page::ANSWER);
    for value in [1, 2] {
        // SAFETY: the words stay registered until the stream has finished.
        let status = unsafe { (operations.wait)(stream, asked, value, STREAM_WAIT_VALUE_GEQ) };
        driver.check("cuStreamWaitValue64", status)?;
        // SAFETY: as above.
        let status = unsafe { (operations.write)(stream, answer, value, STREAM_WRITE_VALUE_DEFAULT) };
        driver.check("cuStreamWriteValue64", status)?;
    }
    // The last one is what frees a stream whose peer has died.
    for (question, before, expected) in [(1, 0, 1), (TIMELINE_END, 1, 2)] {
        if page.answer().load(Ordering::Acquire) != before {
            return Err(silent("did not wait"));
        }
        page.asked().store(question, Ordering::Release);
        if !comes_true(|| page.answer().load(Ordering::Acquire) != before) {
            return Err(silent("did not see a value that the host wrote, or the host not its answer"));
        }
        if page.answer().load(Ordering::Acquire) != expected {
            return Err(silent("did not wait"));
        }
    }
    Ok(())
}

fn comes_true(what: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while !what() {
        if begin.elapsed() > PATIENCE {
            return false;
        }
        thread::sleep(PAUSE);
    }
    true
}

fn silent(what: &str) -> Error {
    unsupported(&format!("use words: when tried, the device {what}"))
}

/// Memory as two processes share it.
struct Page(NonNull<u8>);

impl Page {
    const ASKED: u64 = 0;
    const ANSWER: u64 = 64;

    fn map() -> Result<Self> {
        let failed = |error| Error::io("making a page of words to try", error);
        let file = memfd_create("device-ipc-probe", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, BYTES as u64).map_err(failed)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let address = unsafe { mmap(ptr::null_mut(), BYTES, protection, MapFlags::SHARED, &file, 0) };
        let address = NonNull::new(address.map_err(failed)?.cast());
        address.map(Self).ok_or_else(|| unsupported("map a page of words to try"))
    }

    fn asked(&self) -> &AtomicU64 {
        self.word(Self::ASKED)
    }

    fn answer(&self) -> &AtomicU64 {
        self.word(Self::ANSWER)
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: inside the mapping, which lives as long as `self`; aligned; touched atomically only.
        unsafe { AtomicU64::from_ptr(self.0.byte_add(offset as usize).cast().as_ptr()) }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this size; nothing refers to it any longer.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}
