//! Host memory of other owners, registered for a device with `aclrtHostRegister` ("Host Memory Management").

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, Error, Result};

use super::driver::Driver;
use crate::bindings::*;
use crate::library::call;

/// The registered pages, by device and address.
#[derive(Debug, Default)]
pub(crate) struct HostPages {
    pages: Mutex<HashMap<(DeviceOrdinal, usize), Registration>>,
}

#[derive(Debug)]
struct Registration {
    /// The address for the device.
    mapped: DevicePtr,
    uses: usize,
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
        let _current = driver.enter(device)?;
        let mut table = self.lock();
        let key = (device, pages.as_ptr() as usize);
        if let Some(known) = table.get_mut(&key) {
            known.uses += 1;
            return Ok(known.mapped);
        }
        let mut mapped: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pages stay mapped until they are unregistered, as the caller promised; writes one address.
        let status = unsafe {
            call!(
                driver,
                aclrtHostRegister(
                    pages.as_ptr().cast(),
                    len as u64,
                    aclrtHostRegisterType::ACL_HOST_REGISTER_MAPPED,
                    &raw mut mapped
                )
            )
        };
        driver.check("aclrtHostRegister", status)?;
        let mapped = DevicePtr::new(mapped as usize as u64);
        table.insert(key, Registration { mapped, uses: 1 });
        Ok(mapped)
    }

    /// Ends one use of registered pages.
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
        let _current = driver.enter(device)?;
        let mut table = self.lock();
        let key = (device, pages.as_ptr() as usize);
        let Some(known) = table.get_mut(&key) else {
            return Err(Error::InvalidRegion(format!(
                "no pages at {pages:p} are registered for device {device}"
            )));
        };
        known.uses -= 1;
        if known.uses > 0 {
            return Ok(());
        }
        table.remove(&key);
        // SAFETY: registered by `register`; no work uses the pages any longer, as the caller promised.
        let status = unsafe { call!(driver, aclrtHostUnregister(pages.as_ptr().cast())) };
        driver.check("aclrtHostUnregister", status)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(DeviceOrdinal, usize), Registration>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
