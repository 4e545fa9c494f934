//! Registered host memory, for the counters of timelines and for asynchronous copies.

#![allow(unsafe_code, reason = "host memory is passed to the engine")]

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, Result};
use device_ipc_mock_engine::{Address, Machine};

use crate::errors::engine;

/// Registration counts of host pages. The engine registers a page once, for all devices.
#[derive(Debug)]
pub(crate) struct HostPages {
    machine: Arc<Machine>,
    registered: Mutex<HashMap<u64, usize>>,
}

impl HostPages {
    pub(crate) fn new(machine: Arc<Machine>) -> Self {
        Self { machine, registered: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, usize>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers pages, or increments their count.
    ///
    /// # Safety
    ///
    /// The pages stay mapped and writable until they were unregistered the same number of times.
    pub(crate) unsafe fn register(
        &self,
        device: DeviceOrdinal,
        pages: NonNull<u8>,
        len: usize,
    ) -> Result<DevicePtr> {
        self.machine.peer_access(device.index(), device.index()).map_err(engine("register_host"))?;
        let number = address_of(pages).get();
        let mut registered = self.lock();
        if !registered.contains_key(&number) {
            // SAFETY: as the caller promised.
            unsafe { self.machine.register_host(address_of(pages), len as u64) }
                .map_err(engine("register_host"))?;
        }
        *registered.entry(number).or_default() += 1;
        Ok(DevicePtr::new(number))
    }

    /// Decrements the count of pages, and unregisters them at 0.
    pub(crate) fn unregister(&self, pages: NonNull<u8>) -> Result<()> {
        let number = address_of(pages).get();
        let mut registered = self.lock();
        let Some(count) = registered.get_mut(&number) else { return Ok(()) };
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        registered.remove(&number);
        drop(registered);
        self.machine.unregister_host(address_of(pages)).map_err(engine("unregister_host"))
    }
}

/// Returns the engine's address of host memory, which is its host address.
pub(crate) fn address_of(pages: NonNull<u8>) -> Address {
    Address::new(pages.as_ptr().expose_provenance() as u64)
}
