//! Words in host memory that the engine's streams write and wait on.

#![allow(unsafe_code, reason = "host memory is handed to the engine")]

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, DeviceTimelines, Result};
use device_ipc_mock_engine::{Address, Machine};

use crate::errors::engine;
use crate::memory::stream_of;

/// How often each page has been registered: the engine takes it once, for all devices.
#[derive(Debug)]
pub(crate) struct MockTimelines {
    machine: Arc<Machine>,
    registered: Mutex<HashMap<u64, usize>>,
}

impl MockTimelines {
    pub(crate) fn new(machine: Arc<Machine>) -> Self {
        Self { machine, registered: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, usize>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn number(pages: NonNull<u8>) -> u64 {
    pages.as_ptr().expose_provenance() as u64
}

impl DeviceTimelines for MockTimelines {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr> {
        self.machine.peer_access(device.index(), device.index()).map_err(engine("register_host"))?;
        let number = number(pages);
        let mut registered = self.lock();
        if !registered.contains_key(&number) {
            // SAFETY: as the caller promised.
            unsafe { self.machine.register_host(Address::new(number), len as u64) }
                .map_err(engine("register_host"))?;
        }
        *registered.entry(number).or_default() += 1;
        Ok(DevicePtr::new(number))
    }

    unsafe fn unregister(&self, _device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        let number = number(pages);
        let mut registered = self.lock();
        let Some(count) = registered.get_mut(&number) else { return Ok(()) };
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        registered.remove(&number);
        drop(registered);
        self.machine.unregister_host(Address::new(number)).map_err(engine("unregister_host"))
    }

    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let stream = stream_of(stream)?;
        self.machine.write_value64(stream, Address::new(word.get()), value).map_err(engine("write_value64"))
    }

    unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let stream = stream_of(stream)?;
        self.machine.wait_value64(stream, Address::new(word.get()), value).map_err(engine("wait_value64"))
    }
}
