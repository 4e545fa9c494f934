//! What this machine says about the assumptions that the backend rests on.
//!
//! The backend follows the sources of the vendor's driver and runtime; docs/internals/ascend-rules.md lists the points at which a card
//! may show something else. [`AscendBackend::observe`] makes the calls in question and says what came back, so that a user with
//! a card can report it.

use device_ipc_core::{DeviceMemory, DeviceOrdinal, DeviceRange, HandleKind, Result};

use crate::backend::AscendBackend;
use crate::bindings::*;
use crate::driver::{Driver, call};
use crate::extent::address;
use crate::kinds::{KEY, SHAREABLE};
use crate::peers::Reach;
use crate::stream::AscendStream;
use crate::timelines::SharedPage;
use crate::wire::KEY_BYTES;

const BYTES: u64 = 2 << 20;

/// One assumption, and what this machine shows of it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Observation {
    /// What was looked at, in a few words: the row of docs/internals/ascend-rules.md.
    pub topic: &'static str,
    /// The calls and what they returned.
    pub seen: String,
    /// Whether that is what the backend assumes.
    pub as_assumed: bool,
}

impl AscendBackend {
    /// Looks at what the backend assumes of the vendor's stack, by calls of its own on the first devices. Takes some
    /// memory of each for a moment, and enables peer access between neighbours.
    ///
    /// # Errors
    ///
    /// Those of the device that is looked at, where it cannot be used at all.
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

    fn allocated<T>(
        &self,
        device: DeviceOrdinal,
        kind: HandleKind,
        look: impl FnOnce(DeviceRange) -> Result<T>,
    ) -> Result<T> {
        let range = self.allocate_as(device, BYTES, kind)?;
        let looked = look(range);
        // SAFETY: what looked at it has finished.
        unsafe { self.free(range) }?;
        looked
    }

    /// Two keys of one block, destroyed in the order of their making.
    fn observe_keys(&self, device: DeviceOrdinal) -> Result<Observation> {
        let driver = self.driver();
        let statuses = self.allocated(device, KEY, |range| {
            let _current = driver.enter(device)?;
            let mut keys = [[0u8; KEY_BYTES]; 2];
            let mut statuses = Vec::new();
            for key in &mut keys {
                let flags = ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION;
                // SAFETY: writes a key into as many bytes as are stated.
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
                // SAFETY: the key ends with a NUL, and was made above.
                statuses.push(unsafe { call!(driver, aclrtIpcMemClose(key.as_ptr().cast())) });
            }
            Ok(statuses)
        })?;
        let seen =
            format!("device {device}: two keys of one block made and destroyed in this order: {statuses:?}");
        Ok(Observation { topic: "several keys of one block", seen, as_assumed: statuses == [ACL_SUCCESS; 4] })
    }

    /// A further device for a mapping of this process's own memory.
    fn observe_access(&self, home: DeviceOrdinal, other: DeviceOrdinal) -> Result<Observation> {
        let topic = "access of a further device to physical memory";
        if self.driver().reach_of(other, home)? == Reach::Nothing {
            let seen = format!("device {other} does not reach device {home}");
            return Ok(Observation { topic, seen, as_assumed: true });
        }
        let outcome = self.allocated(home, SHAREABLE, |range| Ok(self.driver().open_up(range, other)))?;
        let seen = match &outcome {
            Ok(()) => format!("memory of device {home}, device {other}: granted"),
            Err(error) => format!("memory of device {home}, device {other}: {error}"),
        };
        Ok(Observation { topic, seen, as_assumed: outcome.is_ok() })
    }

    /// Words that streams write: in memory of the device, and of the host.
    fn observe_words(&self, device: DeviceOrdinal) -> Result<Observation> {
        let topic = "words that streams write";
        let driver = self.driver();
        if !crate::timelines::exist(driver) {
            return Ok(Observation { topic, seen: "this CANN has none".into(), as_assumed: true });
        }
        let stream = AscendStream::create(driver, device)?;
        let in_device = self.allocated(device, KEY, |range| {
            // SAFETY: the word lies in the range, which is freed after the stream has passed.
            let written = unsafe { driver.value_write(range.ptr, 7, stream.raw()) };
            driver.synchronize_raw(device, &stream)?;
            Ok(written)
        })?;
        let page = SharedPage::new()?;
        // SAFETY: the page stays mapped until it is unregistered below.
        let registered = unsafe { driver.register(device, page.at, SharedPage::BYTES) };
        let in_host = match registered {
            Ok(word) => {
                // SAFETY: the word lies in the page, which is unregistered after the stream has passed.
                let written = unsafe { driver.value_write(word, 7, stream.raw()) };
                driver.synchronize_raw(device, &stream)?;
                // SAFETY: no work uses the page any longer.
                unsafe { driver.unregister(device, page.at) }?;
                written
            }
            Err(error) => Err(error),
        };
        let tell = |outcome: &Result<()>| match outcome {
            Ok(()) => "written".to_owned(),
            Err(error) => error.to_string(),
        };
        let seen = format!(
            "device {device}: in device memory: {}; in registered host memory: {}",
            tell(&in_device),
            tell(&in_host)
        );
        Ok(Observation { topic, seen, as_assumed: in_host.is_err() })
    }
}

impl Driver {
    fn observe_chips(&self) -> Observation {
        let chips: Vec<String> = self
            .devices
            .iter()
            .map(|device| {
                let number = device.chip_number.map_or_else(|| "untold".into(), |number| number.to_string());
                format!("device {} is {} on chip {number}", device.info.ordinal, device.info.name)
            })
            .collect();
        Observation { topic: "chips", seen: chips.join(", "), as_assumed: true }
    }

    fn observe_init(&self) -> Result<Observation> {
        let before = self.initialisation();
        if let Some(device) = self.devices.first() {
            drop(self.enter(device.info.ordinal)?);
        }
        let after = self.initialisation();
        let seen = format!("devices were listed with aclInit {before}; with a context it is {after}");
        Ok(Observation { topic: "aclInit", seen, as_assumed: before == "not called" })
    }

    /// What the status says before, between and after both directions are enabled.
    fn observe_peers(&self, one: DeviceOrdinal, other: DeviceOrdinal) -> Result<Observation> {
        let topic = "peer access";
        let reach = (self.reach_of(one, other)?, self.reach_of(other, one)?);
        let mut seen = format!("devices {one} and {other} reach each other by {reach:?}");
        let mut statuses = vec![self.peer_status(one, other)?];
        let mut enabled = Vec::new();
        for (from, to) in [(one, other), (other, one)] {
            let _current = self.enter(from)?;
            // SAFETY: enables the access of the current device; the flags are reserved.
            enabled.push(unsafe { call!(self, aclrtDeviceEnablePeerAccess(self.device(to)?.number(), 0)) });
            statuses.push(self.peer_status(one, other)?);
        }
        seen += &format!(
            "; aclrtDeviceEnablePeerAccess returned {enabled:?}; aclrtDevicePeerAccessStatus by physical id was \
             {statuses:?} before, between and after"
        );
        let as_assumed = match reach {
            (Reach::Peer, Reach::Peer) => enabled == [ACL_SUCCESS; 2] && statuses.last() == Some(&Some(1)),
            (Reach::Chip, Reach::Chip) => !enabled.contains(&ACL_SUCCESS),
            _ => true,
        };
        Ok(Observation { topic, seen, as_assumed })
    }

    fn peer_status(&self, one: DeviceOrdinal, other: DeviceOrdinal) -> Result<Option<i32>> {
        let mut physical = 0;
        let number = self.device(other)?.number();
        // SAFETY: writes one number. The argument called the logic id is the user id.
        let status = unsafe { call!(self, aclrtGetPhyDevIdByLogicDevId(number, &raw mut physical)) };
        if status != ACL_SUCCESS {
            return Ok(None);
        }
        let mut there = 0;
        let number = self.device(one)?.number();
        // SAFETY: writes one int.
        let status = unsafe { call!(self, aclrtDevicePeerAccessStatus(number, physical, &raw mut there)) };
        Ok((status == ACL_SUCCESS).then_some(there))
    }

    fn synchronize_raw(&self, device: DeviceOrdinal, stream: &AscendStream) -> Result<()> {
        let _current = self.enter(device)?;
        // SAFETY: the stream lives.
        self.check("aclrtSynchronizeStream", unsafe { call!(self, aclrtSynchronizeStream(stream.raw())) })
    }
}
