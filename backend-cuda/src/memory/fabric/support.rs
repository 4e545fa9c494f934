//! Whether devices support fabric handles.
//!
//! Only a trial answers this: the device attribute also reports support without an IMEX channel, when the driver
//! refuses every call (observed with driver 580.159.04 on H200).

use std::fmt;
use std::sync::OnceLock;

use device_ipc_core::backend::VendorStatus;
use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::layout::HANDLE_TYPE_FABRIC;
use crate::library::status::{self, number};
use crate::memory::virtual_memory::block::{self, Block};
use crate::objects::driver::Driver;

/// The remedy for `CUDA_ERROR_NOT_PERMITTED`.
pub(super) const CHANNEL_HINT: &str = "Fabric handles need an IMEX channel that both processes can access: check that \
     /dev/nvidia-caps-imex-channels/channel0 exists (nvidia-modprobe -s -i 0:1, or the option \
     NVreg_CreateImexChannel0=1 of the kernel module), and pass it to containers; or use memory of the kind \
     virtual-memory, which needs none";

/// A device's support for fabric handles.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FabricSupport {
    /// Supported: creating a block succeeded.
    Available,
    /// Possibly supported by the hardware, but refused to this process.
    NotPermitted {
        /// How to obtain permission.
        remedy: String,
    },
    /// Not supported.
    NotSupported {
        /// The reason.
        why: String,
    },
}

impl fmt::Display for FabricSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Available => f.write_str("fabric handles work"),
            Self::NotPermitted { remedy } => write!(f, "fabric handles are not permitted: {remedy}"),
            Self::NotSupported { why } => write!(f, "fabric handles are not supported: {why}"),
        }
    }
}

/// The results of one trial per device.
#[derive(Debug)]
pub(crate) struct FabricProbes(Vec<OnceLock<FabricSupport>>);

impl FabricProbes {
    pub(crate) fn new(driver: &Driver) -> Self {
        Self(driver.devices.iter().map(|_| OnceLock::new()).collect())
    }

    /// Returns the support of a device; the first call tries to create a block.
    pub(crate) fn get(&self, driver: &Driver, device: DeviceOrdinal) -> Result<FabricSupport> {
        driver.device(device)?;
        let slot = &self.0[device.index()];
        if let Some(known) = slot.get() {
            return Ok(known.clone());
        }
        let found = probe(driver, device)?;
        tracing::debug!(target: crate::LOG, %device, %found, "tried to create a block with a fabric handle");
        Ok(slot.get_or_init(|| found).clone())
    }
}

fn probe(driver: &Driver, device: DeviceOrdinal) -> Result<FabricSupport> {
    if driver.api.virtual_memory.is_none() {
        return Ok(FabricSupport::NotSupported { why: "the driver has no virtual memory; update it".into() });
    }
    let _current = driver.enter(device)?;
    // A driver without this type of handle already refuses here.
    let status = match block::granularity(driver, device, HANDLE_TYPE_FABRIC) {
        Ok(granularity) => match Block::create(driver, device, granularity, HANDLE_TYPE_FABRIC)? {
            Ok(_released_at_once) => return Ok(FabricSupport::Available),
            Err(status) => status,
        },
        Err(_) => number::ERROR_NOT_SUPPORTED,
    };
    interpret(status).ok_or_else(|| driver.error("cuMemCreate", status, ""))
}

/// Returns the support that a status of `cuMemCreate` implies, or `None` if the status is about something else.
fn interpret(status: i32) -> Option<FabricSupport> {
    match status {
        number::ERROR_NOT_PERMITTED => Some(FabricSupport::NotPermitted { remedy: CHANNEL_HINT.into() }),
        number::ERROR_NOT_SUPPORTED | number::ERROR_INVALID_VALUE | number::ERROR_INVALID_DEVICE => {
            let name = status::name(VendorStatus(status)).unwrap_or_default();
            Some(FabricSupport::NotSupported {
                why: format!(
                    "the device or the driver lacks them (cuMemCreate returned {name}); use memory of the kind \
                     virtual-memory"
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
    fn create_status_distinguishes_refusals_from_exhaustion() {
        let Some(FabricSupport::NotPermitted { remedy }) = interpret(number::ERROR_NOT_PERMITTED) else {
            panic!()
        };
        assert!(remedy.contains("IMEX channel"));
        let Some(FabricSupport::NotSupported { why }) = interpret(number::ERROR_NOT_SUPPORTED) else {
            panic!()
        };
        assert!(why.contains("CUDA_ERROR_NOT_SUPPORTED"), "{why}");
        assert_eq!(interpret(number::ERROR_OUT_OF_MEMORY), None);
        assert_eq!(interpret(31337), None);
    }
}
