//! Words in host memory that streams write and wait on.
//!
//! "Stream Memory Operations" (`group__CUDA__MEMOP`) on pages of `cuMemHostRegister` ("Memory Management",
//! `group__CUDA__MEM`). A waiting stream polls the word without a thread of the host; a write is behind a fence for
//! all that its stream has written. Pages of a memory file that two processes map and register are one word for the
//! streams of both (seen with driver 580.159.04 on an H200).

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, DeviceTimelines, Error, Result};

use crate::NAME;
use crate::api::{
    Api, DEVICE_ATTRIBUTE_FORMER_VALUE_OPERATIONS, DEVICE_ATTRIBUTE_VALUE_OPERATIONS, DevicePointer,
    HostPagesApi, MEMHOSTREGISTER_PORTABLE_DEVICEMAP, STREAM_WAIT_VALUE_GEQ, STREAM_WRITE_VALUE_DEFAULT,
    Stream,
};
use crate::backend::CudaBackend;
use crate::driver::Driver;
use crate::status::number;

type Operation = unsafe extern "C" fn(Stream, DevicePointer, u64, c_uint) -> i32;

/// The two operations, of the newest form that the driver has.
#[derive(Clone, Copy)]
struct ValueOperations {
    write: Operation,
    wait: Operation,
    /// The device attribute that says whether a device has them.
    attribute: c_int,
}

impl ValueOperations {
    fn of(api: &Api) -> Option<Self> {
        let newest = api.value_operations.as_ref().map(|found| Self {
            write: found.write,
            wait: found.wait,
            attribute: DEVICE_ATTRIBUTE_VALUE_OPERATIONS,
        });
        newest.or_else(|| {
            api.former_value_operations.as_ref().map(|found| Self {
                write: found.write,
                wait: found.wait,
                attribute: DEVICE_ATTRIBUTE_FORMER_VALUE_OPERATIONS,
            })
        })
    }
}

/// The pages that are registered, by their address. The driver takes pages once, for all devices.
#[derive(Debug, Default)]
pub(crate) struct RegisteredPages {
    pages: Mutex<HashMap<usize, Pages>>,
    left: Condvar,
}

#[derive(Debug)]
struct Pages {
    len: usize,
    /// The device whose context was current when the driver took them.
    home: DeviceOrdinal,
    /// A device for each registration. Empty while the driver takes the pages back.
    users: Vec<DeviceOrdinal>,
}

impl RegisteredPages {
    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Pages>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table, once the driver is not taking these pages back.
    fn lock_settled(&self, address: usize) -> MutexGuard<'_, HashMap<usize, Pages>> {
        let leaving = |pages: &mut HashMap<usize, Pages>| {
            pages.get(&address).is_some_and(|pages| pages.users.is_empty())
        };
        self.left.wait_while(self.lock(), leaving).unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceTimelines for CudaBackend {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr> {
        let driver = self.driver();
        if !driver.has_timelines(device)? {
            return Err(unsupported("register pages for its streams"));
        }
        let _current = driver.enter(device)?;
        let table = driver.registered.lock_settled(address_of(pages));
        // SAFETY: as the caller promised.
        unsafe { driver.register(table, device, pages, len) }
    }

    /// Waits for streams where the driver does, as for `cuMemFree`.
    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.driver().unregister(device, pages) }
    }

    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let operations = driver.value_operations()?;
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "writing a timeline's value")?;
        // SAFETY: the word is registered for the stream's device until the stream has got there, as the caller promised;
        // the stream lives, as `BorrowedStream` promises.
        let status = unsafe { (operations.write)(raw, word.get(), value, STREAM_WRITE_VALUE_DEFAULT) };
        driver.check("cuStreamWriteValue64", status)
    }

    /// The driver compares as signed numbers do: every value below 2^63 is above those that it is greater than.
    unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let operations = driver.value_operations()?;
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "waiting for a timeline's value")?;
        // SAFETY: as above.
        let status = unsafe { (operations.wait)(raw, word.get(), value, STREAM_WAIT_VALUE_GEQ) };
        driver.check("cuStreamWaitValue64", status)
    }
}

impl Driver {
    /// Do streams of the device write and wait on words? The driver's word is taken: a trial would register pages and take
    /// them back, for which the driver waits until all streams of the device are idle.
    pub(crate) fn has_timelines(&self, ordinal: DeviceOrdinal) -> Result<bool> {
        let device = self.device(ordinal)?;
        let Some(operations) = ValueOperations::of(&self.api) else { return Ok(false) };
        let mut able: c_int = 0;
        // SAFETY: writes one int; an attribute that the driver does not know is an error.
        let status =
            unsafe { (self.api.device_get_attribute)(&raw mut able, operations.attribute, device.handle) };
        Ok(status == number::SUCCESS && able != 0 && self.api.host_pages.is_some())
    }

    fn value_operations(&self) -> Result<ValueOperations> {
        ValueOperations::of(&self.api).ok_or_else(|| unsupported("write and wait on words"))
    }

    fn host_pages(&self) -> Result<&HostPagesApi> {
        self.api.host_pages.as_ref().ok_or_else(|| unsupported("register host memory"))
    }

    /// Registers pages, or counts one more registration of them. The device's context is current.
    ///
    /// # Safety
    ///
    /// As [`DeviceTimelines::register`].
    unsafe fn register(
        &self,
        mut table: MutexGuard<'_, HashMap<usize, Pages>>,
        device: DeviceOrdinal,
        pages: NonNull<u8>,
        len: usize,
    ) -> Result<DevicePtr> {
        let api = self.host_pages()?;
        let host: *mut c_void = pages.as_ptr().cast();
        let known = table.get(&address_of(pages));
        if let Some(known) = known.filter(|known| known.len < len) {
            return Err(Error::InvalidRegion(format!(
                "{len} bytes were to be registered where {} are registered already",
                known.len
            )));
        }
        let new = known.is_none();
        if new {
            // SAFETY: the pages stay mapped until they are unregistered, as the caller promised.
            let status = unsafe { (api.register)(host, len, MEMHOSTREGISTER_PORTABLE_DEVICEMAP) };
            let hint = match status {
                number::SUCCESS => "",
                number::ERROR_HOST_MEMORY_ALREADY_REGISTERED => {
                    "Somebody else in this process has registered these pages with CUDA"
                }
                number::ERROR_OUT_OF_MEMORY => {
                    "The pages could not be locked: see the limit on locked memory (ulimit -l)"
                }
                _ => "",
            };
            if status != number::SUCCESS {
                return Err(self.error("cuMemHostRegister", status, hint));
            }
        }
        let mut reached = 0;
        // SAFETY: writes one address; the pages are registered, for all contexts.
        let status = unsafe { (api.device_pointer)(&raw mut reached, host, 0) };
        if let Err(error) = self.check("cuMemHostGetDevicePointer", status) {
            if new {
                // SAFETY: registered above, and used by nobody.
                unsafe { (api.unregister)(host) };
            }
            return Err(error);
        }
        let pages = table.entry(address_of(pages));
        pages.or_insert(Pages { len, home: device, users: Vec::new() }).users.push(device);
        Ok(DevicePtr::new(reached))
    }

    /// # Safety
    ///
    /// As [`DeviceTimelines::unregister`].
    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        let address = address_of(pages);
        let home = {
            let mut table = self.registered.lock();
            let known = table.get_mut(&address);
            let user = known.as_ref().and_then(|known| known.users.iter().position(|user| *user == device));
            let (Some(known), Some(user)) = (known, user) else {
                return Err(Error::InvalidRegion(format!(
                    "no pages at {address:#x} are registered for device {device}"
                )));
            };
            known.users.swap_remove(user);
            if !known.users.is_empty() {
                return Ok(());
            }
            known.home
        };
        // Without the lock: the driver may wait for a stream that waits for somebody who registers pages.
        let unregistered = self.enter(home).and_then(|_current| {
            // SAFETY: registered before, and no longer used, as the caller promised.
            let status = unsafe { (self.host_pages()?.unregister)(pages.as_ptr().cast()) };
            self.check("cuMemHostUnregister", status)
        });
        self.registered.lock().remove(&address);
        self.registered.left.notify_all();
        unregistered
    }
}

fn address_of(pages: NonNull<u8>) -> usize {
    pages.as_ptr().expose_provenance()
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported {
        backend: NAME,
        what: what.into(),
        why: "the device or its driver has no 64-bit stream memory operations (they need a driver of CUDA 11.7 or \
              newer); order by events, or synchronise on the host"
            .into(),
    }
}
