//! The trial whether streams of a device can write and wait on words in host memory.
//!
//! `aclrtValueWrite` and `aclrtValueWait` in "Stream Memory Operation" of the ACL manual describe memory of
//! `aclrtMalloc`; `aclrtHostRegister` in "Host Memory Management" gives host memory an address for the device's
//! kernels. No page states that the former work on the latter, so the backend tries it once per device before it
//! reports the capability.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use device_ipc_core::{DeviceOrdinal, DevicePtr, Error, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::driver::Driver;
use super::host_pages::HostPages;
use super::stream::AscendStream;
use crate::library::NAME;

/// Maximum duration of a device's trial.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(2);
/// The time for which a wait must block the stream before the trial writes the word.
const BLOCKED_FOR: Duration = Duration::from_millis(2);

const PAGE: usize = 4096;

/// Returns whether streams of the device can write and wait on words in host memory. The first call tries it, with a
/// dedicated page and stream.
pub(crate) fn has_timelines(driver: &Arc<Driver>, pages: &HostPages, device: DeviceOrdinal) -> Result<bool> {
    Ok(*driver.device(device)?.timelines.get_or_init(|| succeeds(driver, pages, device)))
}

fn succeeds(driver: &Arc<Driver>, pages: &HostPages, device: DeviceOrdinal) -> bool {
    if !driver.has_value_operations() {
        return false;
    }
    match run(driver, pages, device) {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(target: crate::LOG, %device, %error, "no timelines");
            false
        }
    }
}

fn run(driver: &Arc<Driver>, pages: &HostPages, device: DeviceOrdinal) -> Result<()> {
    let page = SharedPage::new()?;
    let _current = driver.enter(device)?;
    let stream = AscendStream::create(driver, device)?;
    // SAFETY: the page is shared memory, and is unmapped only after `unregister`; see below.
    let mapped = unsafe { pages.register(driver, device, page.at, PAGE)? };
    let outcome = block_and_resume(driver, &page, mapped, &stream);
    // After either outcome, the awaited word has its value.
    match driver.synchronize_stream_within(stream.raw(), TRIAL_TIMEOUT) {
        // SAFETY: the stream has executed all work on the page.
        Ok(()) => unsafe { pages.unregister(driver, device, page.at)? },
        Err(error) => {
            // The stream may still read the page, so both are leaked.
            tracing::warn!(target: crate::LOG, %device, "a stream is blocked on a word in host memory");
            std::mem::forget((page, stream));
            return Err(error);
        }
    }
    outcome
}

/// Submits a wait for the first word and a write of the second: the write must not happen before the first word is
/// written, and soon afterwards.
fn block_and_resume(
    driver: &Driver,
    page: &SharedPage,
    mapped: DevicePtr,
    stream: &AscendStream,
) -> Result<()> {
    let [first, second] = [page.word(0), page.word(1)];
    let second_mapped = mapped.checked_add(8).unwrap_or(DevicePtr::NULL);
    // SAFETY: both words lie in the page, which stays registered until the stream has executed both operations.
    let submitted = unsafe {
        driver
            .wait_value(mapped, 1, stream.raw())
            .and_then(|()| driver.write_value(second_mapped, 7, stream.raw()))
    };
    let begin = Instant::now();
    let mut blocked = true;
    while blocked && begin.elapsed() < BLOCKED_FOR {
        blocked = second.load(Ordering::Acquire) == 0;
        std::hint::spin_loop();
    }
    first.store(1, Ordering::Release);
    submitted?;
    driver.synchronize_stream_within(stream.raw(), TRIAL_TIMEOUT)?;
    match (blocked, second.load(Ordering::Acquire)) {
        (true, 7) => Ok(()),
        (false, _) => Err(failed("a stream did not wait for a word in host memory")),
        (true, other) => Err(failed(&format!("a stream wrote {other} to a word, expected 7"))),
    }
}

fn failed(why: &str) -> Error {
    Error::Unsupported {
        backend: NAME,
        what: "order streams by words in host memory".into(),
        why: why.into(),
    }
}

/// A page of shared memory, like the pages of timelines.
pub(crate) struct SharedPage {
    pub(crate) at: NonNull<u8>,
}

impl SharedPage {
    pub(crate) const BYTES: usize = PAGE;

    pub(crate) fn new() -> Result<Self> {
        let what = "creating a page of shared memory";
        let file =
            memfd_create("device-ipc-trial", MemfdFlags::CLOEXEC).map_err(|error| Error::io(what, error))?;
        ftruncate(&file, PAGE as u64).map_err(|error| Error::io(what, error))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the system chooses.
        let at = unsafe { mmap(std::ptr::null_mut(), PAGE, protection, MapFlags::SHARED, &file, 0) };
        let at = at.map_err(|error| Error::io(what, error))?;
        NonNull::new(at.cast()).map(|at| Self { at }).ok_or_else(|| failed("the system mapped page 0"))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < PAGE / 8, "word {index} lies in the page");
        // SAFETY: the word lies in the page, which is zeroed memory and stays mapped as long as `self`.
        unsafe { self.at.cast::<AtomicU64>().add(index).as_ref() }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and words are borrowed from `self`.
        if let Err(error) = unsafe { munmap(self.at.as_ptr().cast(), PAGE) } {
            tracing::warn!(target: crate::LOG, %error, "munmap failed");
        }
    }
}
