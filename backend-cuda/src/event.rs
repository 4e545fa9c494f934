//! Events that two processes share.
//!
//! "Event Management" (`group__CUDA__EVENT`). An event belongs to a context and is recorded on streams of that context
//! only; streams of any device may wait for it, those of other devices by a [relay](crate::relay). The driver keeps IPC events in `/dev/shm`, which both processes have to
//! share.

use std::sync::{Arc, Mutex, PoisonError};

use device_ipc_core::{BorrowedStream, DeviceEvent, DeviceOrdinal, Error, HandleBytes, Result};

use crate::NAME;
use crate::api::{
    EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, EVENT_WAIT_DEFAULT, Event, IPC_HANDLE_BYTES, IpcHandle,
};
use crate::driver::Driver;
use crate::relay::Relay;
use crate::status::number;

/// An event of this process, or one that was opened from another.
#[derive(Debug)]
pub(crate) struct CudaIpcEvent {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    raw: Event,
    opened: bool,
    /// For streams of other devices; made when the first of them waits. One wait at a time goes through it.
    relay: Mutex<Option<Relay>>,
}

impl CudaIpcEvent {
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
                why: format!("device {device} has no IPC events; synchronise on the host instead"),
            });
        }
        driver.check("cuEventCreate", status)?;
        Ok(Self { driver: Arc::clone(driver), device, raw, opened: false, relay: Mutex::default() })
    }

    /// Opens an event of another process, whose handle may be anything.
    pub(crate) fn open(driver: &Arc<Driver>, handle: &[u8], on: DeviceOrdinal) -> Result<Self> {
        let Ok(reserved) = handle.try_into() else {
            return Err(Error::Protocol(format!(
                "a CUDA event handle has {IPC_HANDLE_BYTES} bytes, and {} came",
                handle.len()
            )));
        };
        let _current = driver.enter(on)?;
        let mut raw = Event::NULL;
        // SAFETY: writes one event; the driver checks the bytes of the handle, whatever they are.
        let status = unsafe { (driver.api.ipc_open_event_handle)(&raw mut raw, IpcHandle { reserved }) };
        let hint = match status {
            number::SUCCESS => {
                tracing::debug!(device = %on, "opened a CUDA IPC event");
                return Ok(Self {
                    driver: Arc::clone(driver),
                    device: on,
                    raw,
                    opened: true,
                    relay: Mutex::default(),
                });
            }
            number::ERROR_MAP_FAILED => {
                "The handle is corrupt or its event is gone; or the two processes do not share /dev/shm, where the driver \
                 keeps IPC events: in containers mount the same one into both (docker --ipc=container:NAME or --ipc=host, a shared emptyDir of medium Memory \
                 in a pod)"
            }
            number::ERROR_INVALID_CONTEXT => {
                "CUDA takes this process for the one that made the event: it has the same process id, here or in \
                 another pid namespace"
            }
            number::ERROR_INVALID_VALUE | number::ERROR_INVALID_HANDLE => {
                "The handle is corrupt, or its event or its process is gone"
            }
            _ => "",
        };
        Err(driver.error("cuIpcOpenEventHandle", status, hint))
    }

    /// Has the last record been reached? The event's context is current.
    fn reached(&self) -> Result<bool> {
        // SAFETY: the event lives as long as `self`.
        match unsafe { (self.driver.api.event_query)(self.raw) } {
            number::ERROR_NOT_READY => Ok(false),
            status => self.driver.check("cuEventQuery", status).map(|()| true),
        }
    }
}

impl DeviceEvent for CudaIpcEvent {
    fn device(&self) -> DeviceOrdinal {
        self.device
    }

    fn export(&self) -> Result<HandleBytes> {
        if self.opened {
            return Err(Error::Unsupported {
                backend: NAME,
                what: "export an event that was opened from another process".into(),
                why: "only the process that created it can; pass on the handle that it was opened with"
                    .into(),
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
        if stream.device() != self.device {
            return Err(Error::WrongStream {
                stream: stream.device(),
                what: "recording the event",
                expected: self.device,
            });
        }
        let (raw, _current) = self.driver.enter_with(stream)?;
        self.driver.refuse_capture(raw, "recording the event")?;
        // SAFETY: the event lives; the stream does, as `BorrowedStream` promises.
        self.driver.check("cuEventRecord", unsafe { (self.driver.api.event_record)(self.raw, raw) })
    }

    /// In a stream that is being captured this is done where there is nothing to wait for any longer.
    fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = &self.driver;
        let (raw, current) = driver.enter_with(stream)?;
        if driver.is_capturing(raw)? {
            drop(current);
            let reached = self.query()?;
            return if reached {
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
        self.reached()
    }
}

impl Drop for CudaIpcEvent {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: the event is nobody else's. The driver keeps what it needs where a record or a wait is pending.
        let status = unsafe { (self.driver.api.event_destroy)(self.raw) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(status, "cuEventDestroy failed");
        }
    }
}
