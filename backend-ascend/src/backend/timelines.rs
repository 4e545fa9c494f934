//! Timelines: words in host memory that streams write and wait on.
//!
//! `aclrtValueWrite` and `aclrtValueWait` on pages of `aclrtHostRegister`, on devices that passed the
//! [trial](crate::objects::timeline_trial).

use std::ptr::NonNull;

use device_ipc_core::backend::{DeviceIpc, DeviceTimelines};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, Error, Result};

use super::ascend::AscendBackend;
use crate::library::NAME;

impl DeviceTimelines for AscendBackend {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr> {
        if !self.capabilities(device)?.timelines {
            return Err(Error::Unsupported {
                backend: NAME,
                what: format!("let streams of device {device} write and wait on words in host memory"),
                why: "the device failed the trial; use events, or synchronise on the host".into(),
            });
        }
        // SAFETY: as the caller promised.
        unsafe { self.host_pages.register(self.driver(), device, pages, len) }
    }

    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.host_pages.unregister(self.driver(), device, pages) }
    }

    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let raw = self.driver().stream(stream)?;
        let _current = self.driver().enter(stream.device())?;
        // SAFETY: as the caller promised.
        unsafe { self.driver().write_value(word, value, raw) }
    }

    unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let raw = self.driver().stream(stream)?;
        let _current = self.driver().enter(stream.device())?;
        // SAFETY: as the caller promised.
        unsafe { self.driver().wait_value(word, value, raw) }
    }
}
