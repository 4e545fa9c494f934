//! MPS, NVIDIA's multi-process service ("Multi-Process Service", `docs.nvidia.com/deploy/mps`).
//!
//! The processes that use a device through one MPS server share its hardware context, and so the fate of its work: a kernel
//! that writes to a read-only mapping ends the contexts of all of them, also the exporter's, and a process that is killed
//! while its kernels run ends those of the others (observed with driver 580.159.04).

use std::sync::atomic::{AtomicBool, Ordering};

use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::api::DEVICE_ATTRIBUTE_MPS_ENABLED;
use crate::objects::driver::Driver;

/// Whether this process has logged that it uses a device through MPS.
static WARNED: AtomicBool = AtomicBool::new(false);

impl Driver {
    /// Returns whether this process uses the device through MPS; `None` if the driver does not report it (before CUDA 12.1).
    /// Creates no context.
    pub(crate) fn is_mps_client(&self, ordinal: DeviceOrdinal) -> Result<Option<bool>> {
        let device = self.device(ordinal)?;
        let ask = || self.device_attribute(ordinal, DEVICE_ATTRIBUTE_MPS_ENABLED).map(|value| value != 0);
        Ok(*device.mps.get_or_init(ask))
    }

    /// Logs, once for the process, that it uses the device through MPS.
    pub(super) fn warn_of_mps(&self, ordinal: DeviceOrdinal) {
        if let Ok(Some(true)) = self.is_mps_client(ordinal)
            && !WARNED.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(target: crate::LOG, device = %ordinal,
                "the device is used through MPS: a write to a read-only mapping, or a process that is killed while its kernels run, \
                 ends the use of the device for all processes of the MPS server, also for the exporter"
            );
        }
    }
}
