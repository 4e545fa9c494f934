//! Words in host memory that streams write and wait on.
//!
//! `aclrtValueWrite` and `aclrtValueWait` in "Stream Memory Operation" of the ACL manual, which speaks of memory of
//! `aclrtMalloc`; `aclrtHostRegister` in "Host Memory Management", which gives host memory an address for the device's
//! kernels. That the one works on the other is stated nowhere, so it is tried, once per device, before it is claimed.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, DeviceTimelines, Error, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::NAME;
use crate::backend::AscendBackend;
use crate::bindings::*;
use crate::driver::{Driver, call};
use crate::extent::address;
use crate::stream::AscendStream;

/// How long the trial of a device may take.
const TRIAL: Duration = Duration::from_secs(2);
/// How long a wait has to hold the stream in the trial before its word is written.
const HOLDS: Duration = Duration::from_millis(2);

const PAGE: usize = 4096;

/// The pages that are registered, by device and address: where the device sees them, and how often they are in use.
#[derive(Default)]
pub(crate) struct Registered {
    pages: Mutex<HashMap<(DeviceOrdinal, usize), (DevicePtr, usize)>>,
}

impl Registered {
    fn lock(&self) -> MutexGuard<'_, HashMap<(DeviceOrdinal, usize), (DevicePtr, usize)>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceTimelines for AscendBackend {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr> {
        if !crate::device::capabilities(self.driver(), device)?.timelines {
            return Err(Error::Unsupported {
                backend: NAME,
                what: format!("have streams of device {device} write and wait on words of the host's memory"),
                why: "the device did not pass the trial; use events, or synchronise on the host".into(),
            });
        }
        // SAFETY: as the caller promised.
        unsafe { self.driver().register(device, pages, len) }
    }

    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.driver().unregister(device, pages) }
    }

    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let raw = self.driver().stream(stream)?;
        let _current = self.driver().enter(stream.device())?;
        // SAFETY: as the caller promised.
        unsafe { self.driver().value_write(word, value, raw) }
    }

    unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let raw = self.driver().stream(stream)?;
        let _current = self.driver().enter(stream.device())?;
        // SAFETY: as the caller promised.
        unsafe { self.driver().value_wait(word, value, raw) }
    }
}

impl Driver {
    pub(crate) unsafe fn register(
        &self,
        device: DeviceOrdinal,
        pages: NonNull<u8>,
        len: usize,
    ) -> Result<DevicePtr> {
        let _current = self.enter(device)?;
        let mut registered = self.registered.lock();
        let key = (device, pages.as_ptr() as usize);
        if let Some((seen, uses)) = registered.get_mut(&key) {
            *uses += 1;
            return Ok(*seen);
        }
        let mut seen: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pages stay mapped until they are unregistered, as the caller promised; writes one address.
        let status = unsafe {
            call!(
                self,
                aclrtHostRegister(
                    pages.as_ptr().cast(),
                    len as u64,
                    aclrtHostRegisterType::ACL_HOST_REGISTER_MAPPED,
                    &raw mut seen
                )
            )
        };
        self.check("aclrtHostRegister", status)?;
        let seen = DevicePtr::new(seen as usize as u64);
        registered.insert(key, (seen, 1));
        Ok(seen)
    }

    pub(crate) unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        let _current = self.enter(device)?;
        let mut registered = self.registered.lock();
        let key = (device, pages.as_ptr() as usize);
        let Some((_, uses)) = registered.get_mut(&key) else {
            return Err(Error::InvalidRegion(format!("the pages at {pages:p} are not registered")));
        };
        *uses -= 1;
        if *uses > 0 {
            return Ok(());
        }
        registered.remove(&key);
        // SAFETY: registered above; no work uses the pages any longer, as the caller promised.
        let status = unsafe { call!(self, aclrtHostUnregister(pages.as_ptr().cast())) };
        self.check("aclrtHostUnregister", status)
    }

    pub(crate) unsafe fn value_write(&self, word: DevicePtr, value: u64, stream: aclrtStream) -> Result<()> {
        // SAFETY: the word is registered and stays so, and the stream lives, as the caller promised.
        let status = unsafe { call!(self, aclrtValueWrite(address(word), value, 0, stream)) };
        self.check("aclrtValueWrite", status)
    }

    unsafe fn value_wait(&self, word: DevicePtr, value: u64, stream: aclrtStream) -> Result<()> {
        // SAFETY: as above.
        let status =
            unsafe { call!(self, aclrtValueWait(address(word), value, ACL_STREAM_WAIT_VALUE_GEQ, stream)) };
        self.check("aclrtValueWait", status)
    }
}

/// Does the library have the functions at all?
pub(crate) fn exist(driver: &Driver) -> bool {
    let acl = &driver.acl;
    acl.aclrtValueWrite.is_ok()
        && acl.aclrtValueWait.is_ok()
        && acl.aclrtHostRegister.is_ok()
        && acl.aclrtHostUnregister.is_ok()
}

/// Do streams of the device write and wait on words of the host's memory? Tried with a page and a stream of its own.
pub(crate) fn work(driver: &Arc<Driver>, device: DeviceOrdinal) -> bool {
    if !exist(driver) {
        return false;
    }
    match try_out(driver, device) {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(%device, %error, "no timelines");
            false
        }
    }
}

fn try_out(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<()> {
    let page = SharedPage::new()?;
    let _current = driver.enter(device)?;
    let stream = AscendStream::create(driver, device)?;
    // SAFETY: the page is shared memory, and is unmapped after `unregister` only; see below.
    let seen = unsafe { driver.register(device, page.at, PAGE)? };
    let outcome = hold_and_let_go(driver, &page, seen, &stream);
    // Whatever came out, the word that is waited for has its value by now.
    match driver.idle_within(stream.raw(), TRIAL) {
        // SAFETY: the stream has passed all that uses the page.
        Ok(()) => unsafe { driver.unregister(device, page.at)? },
        Err(error) => {
            // The stream may still read the page: neither goes away.
            tracing::warn!(%device, "a stream hangs on a word of the host's memory");
            std::mem::forget((page, stream));
            return Err(error);
        }
    }
    outcome
}

/// A stream waits for the first word and then writes the second: not before the first is written, and then soon.
fn hold_and_let_go(driver: &Driver, page: &SharedPage, seen: DevicePtr, stream: &AscendStream) -> Result<()> {
    let [first, second] = [page.word(0), page.word(1)];
    let second_seen = seen.checked_add(8).unwrap_or(DevicePtr::NULL);
    // SAFETY: both words lie in the page, which stays registered until the stream has passed.
    let submitted = unsafe {
        driver
            .value_wait(seen, 1, stream.raw())
            .and_then(|()| driver.value_write(second_seen, 7, stream.raw()))
    };
    let begin = Instant::now();
    let mut held = true;
    while held && begin.elapsed() < HOLDS {
        held = second.load(Ordering::Acquire) == 0;
        std::hint::spin_loop();
    }
    first.store(1, Ordering::Release);
    submitted?;
    driver.idle_within(stream.raw(), TRIAL)?;
    match (held, second.load(Ordering::Acquire)) {
        (true, 7) => Ok(()),
        (false, _) => Err(failed("a stream did not wait for a word of the host's memory")),
        (true, other) => Err(failed(&format!("a stream was to write 7 to a word, which is {other}"))),
    }
}

impl Driver {
    /// Waits until the stream has no more work, for so long.
    fn idle_within(&self, stream: aclrtStream, limit: Duration) -> Result<()> {
        let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the stream lives.
        let status = unsafe { call!(self, aclrtSynchronizeStreamWithTimeout(stream, limit)) };
        self.check("aclrtSynchronizeStreamWithTimeout", status)
    }
}

fn failed(what: &str) -> Error {
    Error::Unsupported { backend: NAME, what: "order streams by words".into(), why: what.into() }
}

/// A page of shared memory, as the words of real timelines lie in.
pub(crate) struct SharedPage {
    pub(crate) at: NonNull<u8>,
}

impl SharedPage {
    pub(crate) const BYTES: usize = PAGE;

    pub(crate) fn new() -> Result<Self> {
        let what = "making a page of shared memory";
        let file =
            memfd_create("device-ipc-trial", MemfdFlags::CLOEXEC).map_err(|error| Error::io(what, error))?;
        ftruncate(&file, PAGE as u64).map_err(|error| Error::io(what, error))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, where the system finds room.
        let at = unsafe { mmap(std::ptr::null_mut(), PAGE, protection, MapFlags::SHARED, &file, 0) };
        let at = at.map_err(|error| Error::io(what, error))?;
        NonNull::new(at.cast()).map(|at| Self { at }).ok_or_else(|| failed("the system mapped page 0"))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < PAGE / 8, "a page has so many words");
        // SAFETY: the word lies in the page, which is zeroed memory and stays mapped as long as `self`.
        unsafe { self.at.cast::<AtomicU64>().add(index).as_ref() }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and words are borrowed from `self`.
        if let Err(error) = unsafe { munmap(self.at.as_ptr().cast(), PAGE) } {
            tracing::warn!(%error, "munmap failed");
        }
    }
}
