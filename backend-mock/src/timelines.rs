//! Timelines: 64-bit words in host memory that the engine's streams write and wait for.

#![allow(unsafe_code, reason = "host memory is passed to the engine")]

use std::ptr::NonNull;
use std::sync::Arc;

use device_ipc_core::backend::DeviceTimelines;
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, Result};
use device_ipc_mock_engine::{Address, Machine};

use crate::errors::engine;
use crate::host_pages::HostPages;
use crate::stream::stream_of;

/// The timelines of the engine.
#[derive(Debug)]
pub(crate) struct MockTimelines {
    machine: Arc<Machine>,
    pages: Arc<HostPages>,
}

impl MockTimelines {
    pub(crate) fn new(machine: Arc<Machine>, pages: Arc<HostPages>) -> Self {
        Self { machine, pages }
    }
}

impl DeviceTimelines for MockTimelines {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr> {
        // SAFETY: as the caller promised.
        unsafe { self.pages.register(device, pages, len) }
    }

    unsafe fn unregister(&self, _device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        self.pages.unregister(pages)
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
