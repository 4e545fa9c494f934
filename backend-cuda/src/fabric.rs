//! Whether a device can share memory by fabric handle. Known by trying alone: the device's attribute says that it can
//! also where no IMEX channel is there and every call is refused (seen with driver 580.159.04 on H200).

use std::fmt;
use std::sync::OnceLock;

use device_ipc_core::{DeviceOrdinal, Result};

use crate::backend::CudaBackend;
use crate::driver::Driver;
use crate::layout::HANDLE_TYPE_FABRIC;
use crate::status::{self, number};
use crate::virtual_memory::{self, Block};

/// What to do about `CUDA_ERROR_NOT_PERMITTED`.
pub(crate) const CHANNEL_HINT: &str = "Fabric handles need an IMEX channel that both processes can access: see whether \
     /dev/nvidia-caps-imex-channels/channel0 is there (nvidia-modprobe -s -i 0:1, or the option \
     NVreg_CreateImexChannel0=1 of the kernel's module), in a container pass it on; or use memory of the kind \
     virtual-memory, which needs none";

/// Can a device share memory by fabric handle?
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fabric {
    /// It can: a block was created.
    Available,
    /// The hardware may be able to, and this process may not.
    NotPermitted {
        /// What to do about it.
        remedy: String,
    },
    /// It cannot.
    NotSupported {
        /// Why not.
        why: String,
    },
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Available => f.write_str("fabric handles work"),
            Self::NotPermitted { remedy } => write!(f, "fabric handles are not permitted: {remedy}"),
            Self::NotSupported { why } => write!(f, "fabric handles are not supported: {why}"),
        }
    }
}

/// What was found out about each device.
#[derive(Debug)]
pub(crate) struct Probed(Vec<OnceLock<Fabric>>);

impl Probed {
    pub(crate) fn new(driver: &Driver) -> Self {
        Self(driver.devices.iter().map(|_| OnceLock::new()).collect())
    }
}

impl CudaBackend {
    /// Can this device share memory by fabric handle ([`FABRIC`](crate::FABRIC))? Tries once to create the smallest block,
    /// which creates the device's context, and remembers the answer.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](device_ipc_core::Error::NoSuchDevice), or the driver's error that says nothing about fabric
    /// handles, as for a device without free memory.
    pub fn fabric(&self, device: impl Into<DeviceOrdinal>) -> Result<Fabric> {
        let device = device.into();
        let driver = self.driver();
        driver.device(device)?;
        let slot = &self.fabric.0[device.index()];
        if let Some(known) = slot.get() {
            return Ok(known.clone());
        }
        let found = probe(driver, device)?;
        tracing::debug!(%device, %found, "tried to create a block with a fabric handle");
        Ok(slot.get_or_init(|| found).clone())
    }
}

fn probe(driver: &Driver, device: DeviceOrdinal) -> Result<Fabric> {
    if driver.api.virtual_memory.is_none() {
        return Ok(Fabric::NotSupported { why: "the driver has no virtual memory; update it".into() });
    }
    let _current = driver.enter(device)?;
    // A driver that does not know the type of handle refuses here already.
    let status = match virtual_memory::granularity(driver, device, HANDLE_TYPE_FABRIC) {
        Ok(granularity) => match Block::create(driver, device, granularity, HANDLE_TYPE_FABRIC)? {
            Ok(_released_at_once) => return Ok(Fabric::Available),
            Err(status) => status,
        },
        Err(_) => number::ERROR_NOT_SUPPORTED,
    };
    answer(status).ok_or_else(|| driver.error("cuMemCreate", status, ""))
}

/// What a status of `cuMemCreate` says about fabric handles, or `None` where it says nothing.
fn answer(status: i32) -> Option<Fabric> {
    match status {
        number::ERROR_NOT_PERMITTED => Some(Fabric::NotPermitted { remedy: CHANNEL_HINT.into() }),
        number::ERROR_NOT_SUPPORTED | number::ERROR_INVALID_VALUE | number::ERROR_INVALID_DEVICE => {
            let name = status::name(device_ipc_core::VendorStatus(status)).unwrap_or_default();
            Some(Fabric::NotSupported {
                why: format!(
                    "the device or the driver has none (cuMemCreate says {name}); use memory of the kind virtual-memory"
                ),
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_apart_and_an_exhausted_device_is_no_answer() {
        let Some(Fabric::NotPermitted { remedy }) = answer(number::ERROR_NOT_PERMITTED) else { panic!() };
        assert!(remedy.contains("IMEX channel"));
        let Some(Fabric::NotSupported { why }) = answer(number::ERROR_NOT_SUPPORTED) else { panic!() };
        assert!(why.contains("CUDA_ERROR_NOT_SUPPORTED"), "{why}");
        assert_eq!(answer(number::ERROR_OUT_OF_MEMORY), None);
        assert_eq!(answer(31337), None);
    }
}
