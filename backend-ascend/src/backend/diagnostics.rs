//! Diagnostics: a check of the backend's assumptions on this machine.
//!
//! The backend follows the sources of the vendor's driver and runtime; docs/internals/ascend-rules.md lists the points at which a
//! card may behave differently. [`AscendBackend::observe`] makes the calls in question and returns their results, so
//! that a user with a card can report them.

use device_ipc_core::backend::{DeviceMemory, HandleKind};
use device_ipc_core::{DeviceOrdinal, DeviceRange, Result};

use super::ascend::AscendBackend;
use crate::bindings::*;
use crate::library::call;
use crate::memory::attributes::address;
use crate::memory::kind::{KEY, SHAREABLE};
use crate::memory::wire::KEY_BYTES;
use crate::objects::driver::Driver;
use crate::objects::peers::Reach;
use crate::objects::stream::AscendStream;
use crate::objects::timeline_trial::SharedPage;

const BYTES: u64 = 2 << 20;

/// The result of checking one assumption on this machine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Observation {
    /// The assumption: a row of docs/internals/ascend-rules.md.
    pub topic: &'static str,
    /// The calls and their results.
    pub result: String,
    /// Whether the result confirms the assumption.
    pub as_assumed: bool,
}

impl AscendBackend {
    /// Checks the backend's assumptions about the vendor's stack with calls on the first devices. Temporarily allocates
    /// memory on each, and enables peer access between neighbours.
    ///
    /// # Errors
    ///
    /// An error of a device that cannot be used at all.
    pub fn observe(&self) -> Result<Vec<Observation>> {
        let driver = self.driver();
        let mut observations = vec![driver.observe_chips(), driver.observe_init()?];
        let ordinals: Vec<DeviceOrdinal> = driver.devices.iter().map(|device| device.info.ordinal).collect();
        for pair in ordinals.windows(2) {
            observations.push(driver.observe_peers(pair[0], pair[1])?);
        }
        if let Some(first) = ordinals.first() {
            observations.push(self.observe_keys(*first)?);
            observations.push(self.observe_words(*first)?);
        }
        if let [one, other, ..] = ordinals[..] {
            observations.push(self.observe_access(one, other)?);
        }
        Ok(observations)
    }

    fn with_allocation<T>(
        &self,
        device: DeviceOrdinal,
        kind: HandleKind,
        check: impl FnOnce(DeviceRange) -> Result<T>,
    ) -> Result<T> {
        let range = self.allocate_as(device, BYTES, kind)?;
        let checked = check(range);
        // SAFETY: all work of the check has finished.
        unsafe { self.free(range) }?;
        checked
    }

    /// Creates two keys of one block, and destroys them in the order of their creation.
    fn observe_keys(&self, device: DeviceOrdinal) -> Result<Observation> {
        let driver = self.driver();
        let statuses = self.with_allocation(device, KEY, |range| {
            let _current = driver.enter(device)?;
            let mut keys = [[0u8; KEY_BYTES]; 2];
            let mut statuses = Vec::new();
            for key in &mut keys {
                let flags = ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION;
                // SAFETY: writes a key of the stated number of bytes.
                let status = unsafe {
                    call!(
                        driver,
                        aclrtIpcMemGetExportKey(
                            address(range.ptr),
                            BYTES as usize,
                            key.as_mut_ptr().cast(),
                            KEY_BYTES,
                            flags
                        )
                    )
                };
                statuses.push(status);
            }
            for key in keys.iter().filter(|key| key[0] != 0) {
                // SAFETY: the key ends with a NUL, and was created above.
                statuses.push(unsafe { call!(driver, aclrtIpcMemClose(key.as_ptr().cast())) });
            }
            Ok(statuses)
        })?;
        let result = format!(
            "device {device}: statuses of creating two keys of one block, then destroying them in order: {statuses:?}"
        );
        Ok(Observation {
            topic: "several keys of one block",
            result,
            as_assumed: statuses == [ACL_SUCCESS; 4],
        })
    }

    /// Grants a further device access to a mapping of this process's memory.
    fn observe_access(&self, home: DeviceOrdinal, other: DeviceOrdinal) -> Result<Observation> {
        let topic = "access of a further device to physical memory";
        if self.driver().reach_of(other, home)? == Reach::None {
            let result = format!("device {other} cannot reach device {home}");
            return Ok(Observation { topic, result, as_assumed: true });
        }
        let outcome =
            self.with_allocation(home, SHAREABLE, |range| Ok(self.memory.grant_access(range, other)))?;
        let result = match &outcome {
            Ok(()) => format!("memory of device {home}, device {other}: granted"),
            Err(error) => format!("memory of device {home}, device {other}: {error}"),
        };
        Ok(Observation { topic, result, as_assumed: outcome.is_ok() })
    }

    /// Submits writes of a word in device memory and of one in host memory.
    fn observe_words(&self, device: DeviceOrdinal) -> Result<Observation> {
        let topic = "words that streams write";
        let driver = self.driver();
        if !driver.has_value_operations() {
            let result = "this CANN does not support them".into();
            return Ok(Observation { topic, result, as_assumed: true });
        }
        let stream = AscendStream::create(driver, device)?;
        let in_device = self.with_allocation(device, KEY, |range| {
            // SAFETY: the word lies in the range, which is freed after the stream is idle.
            let written = unsafe { driver.write_value(range.ptr, 7, stream.raw()) };
            driver.synchronize(device, &stream)?;
            Ok(written)
        })?;
        let page = SharedPage::new()?;
        // SAFETY: the page stays mapped until it is unregistered below.
        let registered = unsafe { self.host_pages.register(driver, device, page.at, SharedPage::BYTES) };
        let in_host = match registered {
            Ok(word) => {
                // SAFETY: the word lies in the page, which is unregistered after the stream is idle.
                let written = unsafe { driver.write_value(word, 7, stream.raw()) };
                driver.synchronize(device, &stream)?;
                // SAFETY: no work uses the page any longer.
                unsafe { self.host_pages.unregister(driver, device, page.at) }?;
                written
            }
            Err(error) => Err(error),
        };
        let describe = |outcome: &Result<()>| match outcome {
            Ok(()) => "written".to_owned(),
            Err(error) => error.to_string(),
        };
        let result = format!(
            "device {device}: in device memory: {}; in registered host memory: {}",
            describe(&in_device),
            describe(&in_host)
        );
        Ok(Observation { topic, result, as_assumed: in_host.is_err() })
    }
}

impl Driver {
    fn observe_chips(&self) -> Observation {
        let chips: Vec<String> = self
            .devices
            .iter()
            .map(|device| {
                let number = device.chip_number.map_or_else(|| "unknown".into(), |number| number.to_string());
                format!("device {} is {} on chip {number}", device.info.ordinal, device.info.name)
            })
            .collect();
        Observation { topic: "chips", result: chips.join(", "), as_assumed: true }
    }

    fn observe_init(&self) -> Result<Observation> {
        let before = self.initialisation();
        if let Some(device) = self.devices.first() {
            drop(self.enter(device.info.ordinal)?);
        }
        let after = self.initialisation();
        let result = format!("aclInit after listing devices: {before}; after creating a context: {after}");
        Ok(Observation { topic: "aclInit", result, as_assumed: before == "not called" })
    }

    /// Queries the peer status before, between and after enabling both directions.
    fn observe_peers(&self, one: DeviceOrdinal, other: DeviceOrdinal) -> Result<Observation> {
        let topic = "peer access";
        let reach = (self.reach_of(one, other)?, self.reach_of(other, one)?);
        let mut result = format!("devices {one} and {other} reach each other by {reach:?}");
        let mut statuses = vec![self.peer_status(one, other)?];
        let mut enabled = Vec::new();
        for (from, to) in [(one, other), (other, one)] {
            let _current = self.enter(from)?;
            // SAFETY: enables the access of the current device; the flags are reserved.
            enabled.push(unsafe { call!(self, aclrtDeviceEnablePeerAccess(self.device(to)?.number(), 0)) });
            statuses.push(self.peer_status(one, other)?);
        }
        result += &format!(
            "; aclrtDeviceEnablePeerAccess returned {enabled:?}; aclrtDevicePeerAccessStatus by physical id was \
             {statuses:?} before, between and after"
        );
        let as_assumed = match reach {
            (Reach::Peer, Reach::Peer) => enabled == [ACL_SUCCESS; 2] && statuses.last() == Some(&Some(1)),
            (Reach::Chip, Reach::Chip) => !enabled.contains(&ACL_SUCCESS),
            _ => true,
        };
        Ok(Observation { topic, result, as_assumed })
    }

    fn peer_status(&self, one: DeviceOrdinal, other: DeviceOrdinal) -> Result<Option<i32>> {
        let mut physical = 0;
        let number = self.device(other)?.number();
        // SAFETY: writes one number. The argument called the logic id is the user id.
        let status = unsafe { call!(self, aclrtGetPhyDevIdByLogicDevId(number, &raw mut physical)) };
        if status != ACL_SUCCESS {
            return Ok(None);
        }
        let mut peer_status = 0;
        let number = self.device(one)?.number();
        // SAFETY: writes one int.
        let status =
            unsafe { call!(self, aclrtDevicePeerAccessStatus(number, physical, &raw mut peer_status)) };
        Ok((status == ACL_SUCCESS).then_some(peer_status))
    }

    fn synchronize(&self, device: DeviceOrdinal, stream: &AscendStream) -> Result<()> {
        let _current = self.enter(device)?;
        self.synchronize_stream(stream.raw())
    }
}
