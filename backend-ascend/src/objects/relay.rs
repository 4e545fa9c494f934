//! A relay between devices: it lets a stream of one device wait for an IPC event of another.
//!
//! An IPC event is mapped for the device that was current when it was created or opened. So a stream of that device
//! waits for it, an ordinary event is recorded behind that wait, and the other device's stream waits for the ordinary
//! event, as in torch_npu's copies between devices.

use std::ffi::c_void;
use std::sync::Arc;

use device_ipc_core::{DeviceOrdinal, Result};

use super::driver::Driver;
use super::stream::AscendStream;
use crate::bindings::*;
use crate::library::call;

/// A stream and an ordinary event of one device.
#[derive(Debug)]
pub(crate) struct Relay {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    stream: AscendStream,
    /// `aclrtEvent`.
    passed: usize,
}

impl Relay {
    pub(crate) fn create(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let stream = AscendStream::create(driver, device)?;
        let _current = driver.enter(device)?;
        let passed = driver.create_local_event()?;
        Ok(Self { driver: Arc::clone(driver), device, stream, passed: passed.0 as usize })
    }

    /// Makes `waiter`, a stream of device `on`, wait for the last record of `event`, which is of the relay's device.
    ///
    /// # Safety
    ///
    /// The event and the waiter live.
    pub(crate) unsafe fn wait(
        &self,
        event: aclrtEvent,
        waiter: aclrtStream,
        on: DeviceOrdinal,
    ) -> Result<()> {
        let driver = &self.driver;
        {
            let _current = driver.enter(self.device)?;
            // SAFETY: the event lives as the caller promised, the stream as long as `self`; both are of one device.
            let status = unsafe { call!(driver, aclrtStreamWaitEvent(self.stream.raw(), event)) };
            driver.check("aclrtStreamWaitEvent", status)?;
            // SAFETY: both live as long as `self`.
            let status = unsafe { call!(driver, aclrtRecordEvent(self.passed(), self.stream.raw())) };
            driver.check("aclrtRecordEvent", status)?;
        }
        let _current = driver.enter(on)?;
        // SAFETY: the waiter lives as the caller promised; the event is an ordinary one.
        let status = unsafe { call!(driver, aclrtStreamWaitEvent(waiter, self.passed())) };
        driver.check("aclrtStreamWaitEvent", status)
    }

    fn passed(&self) -> aclrtEvent {
        aclrtEvent(self.passed as *mut c_void)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: the relay owns the event. The runtime keeps the resources of pending work.
        let status = unsafe { call!(self.driver, aclrtDestroyEvent(self.passed())) };
        if status != ACL_SUCCESS {
            tracing::warn!(target: crate::LOG, status, "aclrtDestroyEvent failed");
        }
    }
}
