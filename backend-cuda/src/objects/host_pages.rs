//! Host memory of other owners, registered for the devices with `cuMemHostRegister` ("Memory Management",
//! `group__CUDA__MEM`). Timelines live in such memory, and copies to and from it are asynchronous.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, Error, Result};

use crate::bindings::api::{HostPagesApi, MEMHOSTREGISTER_PORTABLE_DEVICEMAP};
use crate::library::status::number;
use crate::library::{CudaLibrary, NAME};
use crate::objects::driver::Driver;

/// The registered pages by address. The driver registers pages once, for all devices.
#[derive(Debug, Default)]
pub(crate) struct HostPages {
    pages: Mutex<HashMap<usize, Registration>>,
    unregistered: Condvar,
}

#[derive(Debug)]
struct Registration {
    len: usize,
    /// The device whose context was current at the driver's registration.
    registered_on: DeviceOrdinal,
    /// One device per call of `register`. Empty while the driver unregisters the pages.
    users: Vec<DeviceOrdinal>,
}

impl HostPages {
    /// Registers pages, or counts one more use of registered ones.
    ///
    /// # Safety
    ///
    /// As [`DeviceTimelines::register`](device_ipc_core::backend::DeviceTimelines::register).
    pub(crate) unsafe fn register(
        &self,
        driver: &Driver,
        device: DeviceOrdinal,
        pages: NonNull<u8>,
        len: usize,
    ) -> Result<DevicePtr> {
        let api = api(driver)?;
        let _current = driver.enter(device)?;
        let mut table = self.lock_settled(address_of(pages));
        let host: *mut c_void = pages.as_ptr().cast();
        let known = table.get(&address_of(pages));
        if let Some(known) = known.filter(|known| known.len < len) {
            return Err(Error::InvalidRegion(format!(
                "cannot register {len} bytes: {} bytes are already registered at this address",
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
                    "Other code in this process has registered these pages with CUDA"
                }
                number::ERROR_OUT_OF_MEMORY => {
                    "The pages could not be locked: check the limit on locked memory (ulimit -l)"
                }
                _ => "",
            };
            if status != number::SUCCESS {
                return Err(driver.error("cuMemHostRegister", status, hint));
            }
        }
        let mut mapped = 0;
        // SAFETY: writes one address; the pages are registered, for all contexts.
        let status = unsafe { (api.device_pointer)(&raw mut mapped, host, 0) };
        if let Err(error) = driver.check("cuMemHostGetDevicePointer", status) {
            if new {
                // SAFETY: registered above, and unused.
                unsafe { (api.unregister)(host) };
            }
            return Err(error);
        }
        let registration = table.entry(address_of(pages));
        registration
            .or_insert(Registration { len, registered_on: device, users: Vec::new() })
            .users
            .push(device);
        Ok(DevicePtr::new(mapped))
    }

    /// Ends one use of registered pages. Waits for streams where the driver does, as for `cuMemFree`.
    ///
    /// # Safety
    ///
    /// As [`DeviceTimelines::unregister`](device_ipc_core::backend::DeviceTimelines::unregister).
    pub(crate) unsafe fn unregister(
        &self,
        driver: &Driver,
        device: DeviceOrdinal,
        pages: NonNull<u8>,
    ) -> Result<()> {
        let address = address_of(pages);
        let registered_on = {
            let mut table = self.lock();
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
            known.registered_on
        };
        // Without the lock: the driver may wait for a stream that waits for a thread that registers pages.
        let unregistered = driver.enter(registered_on).and_then(|_current| {
            // SAFETY: registered before, and no longer used, as the caller promised.
            let status = unsafe { (api(driver)?.unregister)(pages.as_ptr().cast()) };
            driver.check("cuMemHostUnregister", status)
        });
        self.lock().remove(&address);
        self.unregistered.notify_all();
        unregistered
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Registration>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the table at a time when the driver is not unregistering these pages.
    fn lock_settled(&self, address: usize) -> MutexGuard<'_, HashMap<usize, Registration>> {
        let unregistering = |pages: &mut HashMap<usize, Registration>| {
            pages.get(&address).is_some_and(|pages| pages.users.is_empty())
        };
        self.unregistered.wait_while(self.lock(), unregistering).unwrap_or_else(PoisonError::into_inner)
    }
}

fn api(library: &CudaLibrary) -> Result<&HostPagesApi> {
    library.api.host_pages.as_ref().ok_or_else(|| Error::Unsupported {
        backend: NAME,
        what: "register host memory".into(),
        why: "the driver lacks cuMemHostRegister (CUDA 4.0 or newer has it); copy through other host memory"
            .into(),
    })
}

fn address_of(pages: NonNull<u8>) -> usize {
    pages.as_ptr().expose_provenance()
}
