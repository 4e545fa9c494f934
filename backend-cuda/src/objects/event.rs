//! Events, of this process or between processes ("Event Management", `group__CUDA__EVENT`).
//!
//! An event belongs to a context and is recorded on streams of that context only. Streams of any device may wait for
//! it, those of other devices through a [relay](super::relay). The driver keeps IPC events in `/dev/shm`, which both
//! processes must share.

use std::sync::{Arc, Mutex, PoisonError};

use device_ipc_core::backend::{DeviceEvent, HandleBytes, check_stream_device};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Error, Result};

use crate::bindings::api::{
    EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, EVENT_WAIT_DEFAULT, Event, IPC_HANDLE_BYTES, IpcHandle,
};
use crate::library::NAME;
use crate::library::status::number;
use crate::objects::driver::Driver;
use crate::objects::relay::Relay;

/// An event: of this process alone, or an interprocess event, created by this process or opened from another.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    raw: Event,
    /// Whether another process can open it by a handle from this one.
    is_exportable: bool,
    /// The relay for streams of other devices, created by their first wait. Waits through it are serialised.
    relay: Mutex<Option<Relay>>,
}

impl CudaEvent {
    /// Creates an event of this process alone.
    pub(crate) fn create_local(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        Ok(Self::of(driver, device, driver.create_local_event()?, false))
    }

    /// Creates an event that can be exported.
    pub(crate) fn create(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        let mut raw = Event::NULL;
        // SAFETY: writes one event. An interprocess event must have timing disabled.
        let status =
            unsafe { (driver.api.event_create)(&raw mut raw, EVENT_DISABLE_TIMING | EVENT_INTERPROCESS) };
        if status == number::ERROR_NOT_SUPPORTED {
            return Err(Error::Unsupported {
                backend: NAME,
                what: "create an event that another process can open".into(),
                why: format!("device {device} does not support IPC events; synchronise on the host instead"),
            });
        }
        driver.check("cuEventCreate", status)?;
        Ok(Self::of(driver, device, raw, true))
    }

    fn of(driver: &Arc<Driver>, device: DeviceOrdinal, raw: Event, is_exportable: bool) -> Self {
        Self { driver: Arc::clone(driver), device, raw, is_exportable, relay: Mutex::default() }
    }

    /// Opens an event of another process. The handle's bytes are untrusted.
    pub(crate) fn open(driver: &Arc<Driver>, handle: &[u8], on: DeviceOrdinal) -> Result<Self> {
        let Ok(reserved) = handle.try_into() else {
            return Err(Error::Protocol(format!(
                "received a CUDA event handle of {} bytes, expected {IPC_HANDLE_BYTES}",
                handle.len()
            )));
        };
        let _current = driver.enter(on)?;
        let mut raw = Event::NULL;
        // SAFETY: writes one event; the driver validates the bytes of the handle.
        let status = unsafe { (driver.api.ipc_open_event_handle)(&raw mut raw, IpcHandle { reserved }) };
        let hint = match status {
            number::SUCCESS => {
                tracing::debug!(target: crate::LOG, device = %on, "opened a CUDA IPC event");
                return Ok(Self::of(driver, on, raw, false));
            }
            number::ERROR_MAP_FAILED => {
                "The handle is corrupt or its event was destroyed; or the two processes do not share /dev/shm, where the \
                 driver keeps IPC events: mount the same /dev/shm into both containers (docker --ipc=container:NAME or \
                 --ipc=host, a shared emptyDir of medium Memory in a pod)"
            }
            number::ERROR_INVALID_CONTEXT => {
                "CUDA identifies this process as the creator of the event: both have the same process id, here or in \
                 another pid namespace"
            }
            number::ERROR_INVALID_VALUE | number::ERROR_INVALID_HANDLE => {
                "The handle is corrupt, or its event was destroyed or its process has exited"
            }
            _ => "",
        };
        Err(driver.error("cuIpcOpenEventHandle", status, hint))
    }

    /// Returns whether the last record has completed. The event's context must be current.
    fn is_complete(&self) -> Result<bool> {
        // SAFETY: the event lives as long as `self`.
        match unsafe { (self.driver.api.event_query)(self.raw) } {
            number::ERROR_NOT_READY => Ok(false),
            status => self.driver.check("cuEventQuery", status).map(|()| true),
        }
    }
}

impl DeviceEvent for CudaEvent {
    fn device(&self) -> DeviceOrdinal {
        self.device
    }

    fn export(&self) -> Result<HandleBytes> {
        if !self.is_exportable {
            return Err(Error::Unsupported {
                backend: NAME,
                what: "export an event that was opened from another process, or created for this one alone"
                    .into(),
                why: "only its creator can export it; forward the handle that it was opened with".into(),
            });
        }
        let _current = self.driver.enter(self.device)?;
        let mut handle = IpcHandle { reserved: [0; IPC_HANDLE_BYTES] };
        // SAFETY: writes one handle; the event lives and was created as an interprocess event.
        let status = unsafe { (self.driver.api.ipc_get_event_handle)(&raw mut handle, self.raw) };
        self.driver.check("cuIpcGetEventHandle", status)?;
        Ok(HandleBytes::new(handle.reserved))
    }

    fn record(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.driver.stream(stream)?;
        check_stream_device(stream, "recording the event", self.device)?;
        let (raw, _current) = self.driver.enter_with(stream)?;
        self.driver.refuse_capture(raw, "recording the event")?;
        // SAFETY: the event lives; the stream does, as `BorrowedStream` promises.
        self.driver.check("cuEventRecord", unsafe { (self.driver.api.event_record)(self.raw, raw) })
    }

    /// On a stream that is being captured, succeeds only if the event has already completed.
    fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = &self.driver;
        let (raw, current) = driver.enter_with(stream)?;
        if driver.is_capturing(raw)? {
            drop(current);
            let complete = self.query()?;
            return if complete {
                Ok(())
            } else {
                Err(Error::StreamCapturing { what: "waiting for an event" })
            };
        }
        if stream.device() != self.device {
            drop(current);
            let mut relay = self.relay.lock().unwrap_or_else(PoisonError::into_inner);
            if relay.is_none() {
                *relay = Some(Relay::create(driver, self.device)?);
            }
            let Some(relay) = relay.as_ref() else { return Ok(()) };
            // SAFETY: the event lives as long as `self`; the stream does, as `BorrowedStream` promises.
            return unsafe { relay.wait(self.raw, raw, stream.device()) };
        }
        // SAFETY: as above; both are of one device.
        let status = unsafe { (driver.api.stream_wait_event)(raw, self.raw, EVENT_WAIT_DEFAULT) };
        driver.check("cuStreamWaitEvent", status)
    }

    fn query(&self) -> Result<bool> {
        let _current = self.driver.enter(self.device)?;
        self.is_complete()
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: the event is owned by this value. The driver keeps the resources of pending records and waits.
        let status = unsafe { (self.driver.api.event_destroy)(self.raw) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(target: crate::LOG, status, "cuEventDestroy failed");
        }
    }
}
