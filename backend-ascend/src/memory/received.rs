//! Errors of imports, for every kind of handle.

use device_ipc_core::backend::{ReceivedHandle, Remedy};
use device_ipc_core::{DeviceOrdinal, Error};

use crate::bindings::*;
use crate::library::status::{NEEDED, is_out_of_memory, is_unsupported};
use crate::library::{NAME, VISIBLE_DEVICES};
use crate::objects::chip::Chip;
use crate::objects::driver::Driver;

/// Returns the error for an unsupported open.
pub(super) fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { backend: NAME, what: what.into(), why: why.into() }
}

/// Returns the error of a failed import of `handle` on device `on`.
pub(super) fn import_error(
    driver: &Driver,
    call: &'static str,
    status: aclError,
    handle: &ReceivedHandle,
    on: DeviceOrdinal,
) -> Error {
    if is_out_of_memory(status) {
        let detail = format!("{}; close idle mappings", driver.error(call, status, ""));
        return Error::OutOfMemory { device: on, bytes: handle.size, detail };
    }
    let across = handle.home != Some(on);
    let hint = match status {
        status if is_unsupported(status) => {
            format!("This chip or driver cannot share memory: it requires {NEEDED}, on 910, A2, A3, 310P or 950")
        }
        ACL_ERROR_RT_NO_PERMISSION => {
            "The driver's list of importers does not contain this process; in containers whose process ids the driver \
             does not distinguish, set DEVICE_IPC_ASCEND_PID_VALIDATION=off in the exporter"
                .to_owned()
        }
        ACL_ERROR_RT_DRV_INTERNAL_ERROR if across => {
            let home = match handle.home {
                Some(home) => format!("device {home}"),
                None if driver.device(on).is_ok_and(|device| device.chip == Chip::A3) => format!(
                    "a device that {VISIBLE_DEVICES} hides from this process (make the other die of this chip \
                     visible)"
                ),
                None => format!("a device that {VISIBLE_DEVICES} hides from this process"),
            };
            format!(
                "The home of the memory is {home}, and the driver could not map it on device {on}: the cards may not \
                 support sharing by key (PCIe cards with drivers before 25.5.2 and firmware before 7.8.0.7.220), or \
                 the exporter has closed it. Update the Ascend HDK, {}, \
                 or have the exporter {}: shareable handles (kind 2), \
                 which such cards can open. The driver's log has details: ~/ascend/log/debug/plog",
                Remedy::OpenAtHomeOrStaged,
                Remedy::AllocateAs
            )
        }
        ACL_ERROR_RT_DRV_INTERNAL_ERROR | ACL_ERROR_RT_PARAM_INVALID => {
            "The exporter has closed or freed the memory or has exited, has not listed this process, or the handle is \
             corrupt; the driver's log has details: ~/ascend/log/debug/plog"
                .to_owned()
        }
        _ => String::new(),
    };
    driver.error(call, status, &hint)
}
