//! Host memory that others allocated, made known to the devices: `cuMemHostRegister` ("Memory Management",
//! `group__CUDA__MEM`). The words of timelines lie in it, and copies go to and from it without waiting.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, Error, Result};

use crate::NAME;
use crate::api::{HostPagesApi, MEMHOSTREGISTER_PORTABLE_DEVICEMAP};
use crate::driver::Driver;
use crate::status::number;

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

impl Driver {
    fn host_pages(&self) -> Result<&HostPagesApi> {
        self.api.host_pages.as_ref().ok_or_else(|| Error::Unsupported {
            backend: NAME,
            what: "register host memory".into(),
            why: "its driver lacks cuMemHostRegister (4.0 has it); copy by way of other host memory".into(),
        })
    }

    /// Registers pages, or counts one more registration of them.
    ///
    /// # Safety
    ///
    /// As [`DeviceTimelines::register`](device_ipc_core::DeviceTimelines::register).
    pub(crate) unsafe fn register(
        &self,
        device: DeviceOrdinal,
        pages: NonNull<u8>,
        len: usize,
    ) -> Result<DevicePtr> {
        let api = self.host_pages()?;
        let _current = self.enter(device)?;
        let mut table = self.registered.lock_settled(address_of(pages));
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

    /// Takes back one registration. Waits for streams where the driver does, as for `cuMemFree`.
    ///
    /// # Safety
    ///
    /// As [`DeviceTimelines::unregister`](device_ipc_core::DeviceTimelines::unregister).
    pub(crate) unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
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
