//! A relay between devices: it lets a stream of one device wait for an IPC event of another.
//!
//! `cuStreamWaitEvent` accepts a stream and an event of different devices, but with an event that was created with
//! `CU_EVENT_INTERPROCESS` the driver crashes (observed with driver 580.159.04 on two H200; an ordinary event works).
//! So a stream of the event's device waits for it, an ordinary event is recorded behind that wait, and the other
//! device's stream waits for the ordinary event.

use std::sync::Arc;

use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::api::{EVENT_WAIT_DEFAULT, Event, STREAM_NON_BLOCKING, Stream};
use crate::library::status::number;
use crate::objects::driver::Driver;

/// A stream and an ordinary event of one device.
#[derive(Debug)]
pub(crate) struct Relay {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    stream: Stream,
    passed: Event,
}

impl Relay {
    pub(crate) fn create(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        let passed = driver.create_local_event()?;
        let mut relay = Self { driver: Arc::clone(driver), device, stream: Stream::NULL, passed };
        // SAFETY: writes one stream.
        let status = unsafe { (driver.api.stream_create)(&raw mut relay.stream, STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", status)?;
        Ok(relay)
    }

    /// Makes `waiter`, a stream of device `on`, wait for the last record of `event`, which is of the relay's device.
    ///
    /// # Safety
    ///
    /// The event and the waiter live.
    pub(crate) unsafe fn wait(&self, event: Event, waiter: Stream, on: DeviceOrdinal) -> Result<()> {
        let driver = &self.driver;
        {
            let _current = driver.enter(self.device)?;
            // SAFETY: the event lives as the caller promised, the stream as long as `self`; both are of one device.
            let status = unsafe { (driver.api.stream_wait_event)(self.stream, event, EVENT_WAIT_DEFAULT) };
            driver.check("cuStreamWaitEvent", status)?;
            // SAFETY: both live as long as `self`.
            driver.check("cuEventRecord", unsafe { (driver.api.event_record)(self.passed, self.stream) })?;
        }
        let _current = driver.enter(on)?;
        // SAFETY: the waiter lives as the caller promised; the event is an ordinary one.
        let status = unsafe { (driver.api.stream_wait_event)(waiter, self.passed, EVENT_WAIT_DEFAULT) };
        driver.check("cuStreamWaitEvent", status)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: the relay owns both. The driver keeps the resources of pending work.
        let status = unsafe {
            if self.stream != Stream::NULL {
                (self.driver.api.stream_destroy)(self.stream);
            }
            (self.driver.api.event_destroy)(self.passed)
        };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(target: crate::LOG, status, "cuEventDestroy failed");
        }
    }
}
