//! Events, of this process or between processes.
//!
//! "Event Management" of the ACL manual (`aclrtCreateEventExWithFlag`, `aclrtIpcGetEventHandle`,
//! `aclrtIpcOpenEventHandle`). A record is submitted when `aclrtRecordEvent` returns (`IpcEvent::IpcEventRecord` of the
//! runtime's sources): until then the event counts as complete, so the exporter must not announce a record earlier.
//! An event is recorded on streams of its device only; streams of others wait for it through a [relay](super::relay).

use std::sync::{Arc, Mutex, PoisonError};

use device_ipc_core::backend::{DeviceEvent, HandleBytes, check_stream_device};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Error, Result};

use super::chip::Chip;
use super::driver::Driver;
use super::peers::Reach;
use super::relay::Relay;
use crate::bindings::*;
use crate::library::status::is_unsupported;
use crate::library::{NAME, call};

/// The size of host pages with which IPC events work on every driver.
const USUAL_PAGE: usize = 4096;
/// The first major driver version whose IPC events work with host pages of any size: the rule of torch_npu.
const ANY_PAGE_SINCE_DRIVER: u32 = 26;

const HANDLE_BYTES: usize = ACL_IPC_EVENT_HANDLE_SIZE as usize;

/// An event: of this process alone, or an interprocess event, created by this process or opened from another.
#[derive(Debug)]
pub(crate) struct AscendEvent {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    /// `aclrtEvent`.
    raw: usize,
    /// Whether another process can open it by a handle from this one.
    is_exportable: bool,
    /// The relay for streams of other devices, created by their first wait. Waits through it are serialised.
    relay: Mutex<Option<Relay>>,
}

/// Returns whether the device supports interprocess events. The first call tries to create one.
pub(crate) fn has_events(driver: &Arc<Driver>, ordinal: DeviceOrdinal) -> Result<bool> {
    let device = driver.device(ordinal)?;
    Ok(*device.ipc_events.get_or_init(|| trial_succeeds(driver, ordinal)))
}

fn trial_succeeds(driver: &Arc<Driver>, ordinal: DeviceOrdinal) -> bool {
    let Ok(device) = driver.device(ordinal) else { return false };
    if driver.acl.aclrtIpcGetEventHandle.is_err() || driver.acl.aclrtIpcOpenEventHandle.is_err() {
        return false;
    }
    // According to the manual, 950PR supports them and 950DT does not; torch_npu orders no copies by them on either.
    if device.chip == Chip::Ascend950 {
        return false;
    }
    let version = driver.package_version(c"driver");
    if !pages_fit(rustix::param::page_size(), version.as_deref()) {
        tracing::debug!(target: crate::LOG, ?version, "no IPC events: the host's page size is not 4096 bytes");
        return false;
    }
    match AscendEvent::create_untried(driver, ordinal).and_then(|event| event.export()) {
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(target: crate::LOG, device = %ordinal, %error, "no IPC events");
            false
        }
    }
}

/// Returns whether IPC events work with host pages of this size and this driver version (`25.3.rc1`).
fn pages_fit(page: usize, driver: Option<&str>) -> bool {
    let major = driver.and_then(|version| version.split('.').next()?.trim().parse::<u32>().ok());
    page == USUAL_PAGE || major.is_some_and(|major| major >= ANY_PAGE_SINCE_DRIVER)
}

impl AscendEvent {
    /// Creates an event that can be exported, on a device whose trial succeeded.
    pub(crate) fn create(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        driver.require_events("create", device)?;
        Self::create_untried(driver, device)
    }

    /// Creates an event of this process alone.
    pub(crate) fn create_local(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        Ok(Self::of(driver, device, driver.create_local_event()?, false))
    }

    fn create_untried(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        let mut raw = aclrtEvent(std::ptr::null_mut());
        // SAFETY: writes one event. The runtime refuses the flag in combination with others.
        let status = unsafe { call!(driver, aclrtCreateEventExWithFlag(&raw mut raw, ACL_EVENT_IPC)) };
        driver.check_event_call("aclrtCreateEventExWithFlag", status, "create", device)?;
        Ok(Self::of(driver, device, raw, true))
    }

    fn of(driver: &Arc<Driver>, device: DeviceOrdinal, raw: aclrtEvent, is_exportable: bool) -> Self {
        let raw = raw.0 as usize;
        Self { driver: Arc::clone(driver), device, raw, is_exportable, relay: Mutex::default() }
    }

    /// Opens an event of another process. The handle's bytes are untrusted.
    pub(crate) fn open(driver: &Arc<Driver>, handle: &[u8], on: DeviceOrdinal) -> Result<Self> {
        let Ok(bytes) = <[u8; HANDLE_BYTES]>::try_from(handle) else {
            return Err(Error::Protocol(format!(
                "received an Ascend event handle of {} bytes, expected {HANDLE_BYTES}",
                handle.len()
            )));
        };
        driver.require_events("open", on)?;
        let error = match Self::open_on(driver, bytes, on) {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        // Opening enables peer access, which dies of one chip do not have: an event of the other die is opened there,
        // and streams of this one wait for it through a relay.
        let mut others = driver.devices.iter().map(|device| device.info.ordinal);
        let sibling = others.find(|other| matches!(driver.reach_of(on, *other), Ok(Reach::Chip)));
        sibling.and_then(|sibling| Self::open_on(driver, bytes, sibling).ok()).ok_or(error)
    }

    fn open_on(driver: &Arc<Driver>, bytes: [u8; HANDLE_BYTES], on: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(on)?;
        let handle = aclrtIpcEventHandle { reserved: bytes.map(|byte| byte as std::ffi::c_char) };
        let mut raw = aclrtEvent(std::ptr::null_mut());
        // SAFETY: writes one event; the driver validates the bytes of the handle.
        let status = unsafe { call!(driver, aclrtIpcOpenEventHandle(handle, &raw mut raw)) };
        if matches!(
            status,
            ACL_ERROR_RT_PARAM_INVALID | ACL_ERROR_RT_INVALID_HANDLE | ACL_ERROR_RT_DRV_INTERNAL_ERROR
        ) {
            let hint = "The handle is corrupt, its event was destroyed, its process has exited, or it is a handle of this \
                        process";
            return Err(driver.error("aclrtIpcOpenEventHandle", status, hint));
        }
        driver.check_event_call("aclrtIpcOpenEventHandle", status, "open", on)?;
        tracing::debug!(target: crate::LOG, device = %on, "opened an IPC event");
        Ok(Self::of(driver, on, raw, false))
    }

    fn raw(&self) -> aclrtEvent {
        aclrtEvent(self.raw as *mut _)
    }

    /// Returns whether the last record has completed. The event's context must be current.
    fn is_complete(&self) -> Result<bool> {
        let mut recorded = aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOT_READY;
        // SAFETY: writes one status; the event lives as long as `self`.
        let status = unsafe { call!(self.driver, aclrtQueryEventStatus(self.raw(), &raw mut recorded)) };
        self.driver.check("aclrtQueryEventStatus", status)?;
        Ok(recorded == aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE)
    }
}

impl Driver {
    fn check_event_call(
        &self,
        call: &'static str,
        status: aclError,
        what: &str,
        device: DeviceOrdinal,
    ) -> Result<()> {
        if !is_unsupported(status) {
            return self.check(call, status);
        }
        Err(self.no_events(what, device)?)
    }

    /// Refuses a device without the capability: some runtimes create such events regardless.
    fn require_events(self: &Arc<Self>, what: &str, device: DeviceOrdinal) -> Result<()> {
        if has_events(self, device)? { Ok(()) } else { Err(self.no_events(what, device)?) }
    }

    fn no_events(&self, what: &str, device: DeviceOrdinal) -> Result<Error> {
        Ok(Error::Unsupported {
            backend: NAME,
            what: format!("{what} an interprocess event"),
            why: format!(
                "device {device} ({}) does not support them with {}: they require CANN 8.5 and A2, A3 or 950PR; \
                 synchronise on the host instead",
                self.device(device)?.info.name,
                self.version()
            ),
        })
    }
}

impl DeviceEvent for AscendEvent {
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
        // The call writes only the first eight bytes.
        let mut handle = aclrtIpcEventHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: writes one handle; the event lives and was created to be shared.
        let status = unsafe { call!(self.driver, aclrtIpcGetEventHandle(self.raw(), &raw mut handle)) };
        self.driver.check_event_call("aclrtIpcGetEventHandle", status, "export", self.device)?;
        Ok(HandleBytes::new(handle.reserved.map(|byte| byte as u8)))
    }

    fn record(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let raw = self.driver.stream(stream)?;
        check_stream_device(stream, "recording the event", self.device)?;
        let _current = self.driver.enter(self.device)?;
        // SAFETY: the event lives; the stream does, as `BorrowedStream` promises.
        let status = unsafe { call!(self.driver, aclrtRecordEvent(self.raw(), raw)) };
        self.driver.check("aclrtRecordEvent", status)
    }

    fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let raw = self.driver.stream(stream)?;
        if stream.device() != self.device {
            let mut relay = self.relay.lock().unwrap_or_else(PoisonError::into_inner);
            let relay = match &mut *relay {
                Some(relay) => relay,
                empty => empty.insert(Relay::create(&self.driver, self.device)?),
            };
            // SAFETY: the event lives as long as `self`; the stream does, as `BorrowedStream` promises.
            return unsafe { relay.wait(self.raw(), raw, stream.device()) };
        }
        let _current = self.driver.enter(self.device)?;
        // SAFETY: as above; both are of one device.
        let status = unsafe { call!(self.driver, aclrtStreamWaitEvent(raw, self.raw())) };
        self.driver.check("aclrtStreamWaitEvent", status)
    }

    fn query(&self) -> Result<bool> {
        let _current = self.driver.enter(self.device)?;
        self.is_complete()
    }
}

impl Drop for AscendEvent {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: the event is owned by this value.
        let status = unsafe { call!(self.driver, aclrtDestroyEvent(self.raw())) };
        if status != ACL_SUCCESS {
            tracing::warn!(target: crate::LOG, status, "aclrtDestroyEvent failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_pages_require_driver_26_or_newer() {
        assert!(pages_fit(4096, None));
        assert!(pages_fit(4096, Some("25.3.rc1")));
        assert!(pages_fit(65_536, Some("26.0.RC1")));
        assert!(pages_fit(65_536, Some("27.1.0")));
        for version in [None, Some("25.5.2"), Some(""), Some("unknown"), Some("V26")] {
            assert!(!pages_fit(65_536, version), "{version:?}");
        }
    }
}
