//! The statuses of ACL, with names and hints.
//!
//! Numbers, not an enum: a runtime newer than this crate returns numbers that are absent here, and they are errors like
//! any other. Names and meanings are those of `acl_base_rt.h`, and of the page "aclError" of the ACL manual.

use device_ipc_core::backend::VendorStatus;

use crate::bindings::*;

/// The status of a call whose function the library lacks. ACL's statuses are not negative.
pub(crate) const MISSING: aclError = i32::MIN;

/// The requirements for sharing memory: the functions arrived with CANN 8.3.RC1, and torch_npu, verl and
/// checkpoint-engine all require this driver with it.
pub(crate) const NEEDED: &str =
    "CANN 8.3.RC1 or newer, and Ascend HDK (driver and firmware) 25.3.RC1 or newer";

macro_rules! names {
    ($($constant:ident,)*) => {
        /// Returns the name of a status, or `None` for an unknown one.
        pub(crate) const fn name(status: VendorStatus) -> Option<&'static str> {
            match status.0 {
                $($constant => Some(stringify!($constant)),)*
                _ => None,
            }
        }
    };
}

names! {
    ACL_SUCCESS,
    ACL_ERROR_INVALID_PARAM,
    ACL_ERROR_UNINITIALIZE,
    ACL_ERROR_REPEAT_INITIALIZE,
    ACL_ERROR_REPEAT_FINALIZE,
    ACL_ERROR_COMPILING_STUB_MODE,
    ACL_ERROR_RT_PARAM_INVALID,
    ACL_ERROR_RT_INVALID_DEVICEID,
    ACL_ERROR_RT_CONTEXT_NULL,
    ACL_ERROR_RT_STREAM_CONTEXT,
    ACL_ERROR_RT_ADDR_UNALIGNED,
    ACL_ERROR_RT_INVALID_HANDLE,
    ACL_ERROR_RT_WAIT_TIMEOUT,
    ACL_ERROR_RT_TASK_TIMEOUT,
    ACL_ERROR_BAD_ALLOC,
    ACL_ERROR_API_NOT_SUPPORT,
    ACL_ERROR_INVALID_DEVICE,
    ACL_ERROR_MEMORY_ADDRESS_UNALIGNED,
    ACL_ERROR_INVALID_RESOURCE_HANDLE,
    ACL_ERROR_FEATURE_UNSUPPORTED,
    ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
    ACL_ERROR_RT_MEMORY_ALLOCATION,
    ACL_ERROR_RT_MEMORY_FREE,
    ACL_ERROR_RT_NO_DEVICE,
    ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
    ACL_ERROR_RT_NO_PERMISSION,
    ACL_ERROR_RT_NO_EVENT_RESOURCE,
    ACL_ERROR_RT_NO_STREAM_RESOURCE,
    ACL_ERROR_RT_NO_NOTIFY_RESOURCE,
    ACL_ERROR_RT_OVER_LIMIT,
    ACL_ERROR_RT_REPEATED_INIT,
    ACL_ERROR_RT_DEVICE_OOM,
    ACL_ERROR_RT_TIMEOUT,
    ACL_ERROR_INTERNAL_ERROR,
    ACL_ERROR_FAILURE,
    ACL_ERROR_RT_FAILURE,
    ACL_ERROR_DRV_FAILURE,
    ACL_ERROR_PROFILING_FAILURE,
    ACL_ERROR_RT_INTERNAL_ERROR,
    ACL_ERROR_RT_IPC_ERROR,
    ACL_ERROR_RT_DEV_SETUP_ERROR,
    ACL_ERROR_RT_VECTOR_CORE_EXCEPTION,
    ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
    ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
    ACL_ERROR_RT_DEVICE_MEM_ERROR,
    ACL_ERROR_RT_LINK_ERROR,
    ACL_ERROR_RT_SUSPECT_REMOTE_ERROR,
    ACL_ERROR_RT_DRV_INTERNAL_ERROR,
    ACL_ERROR_RT_SOCKET_CLOSE,
}

/// Returns whether the status means that the chip, the driver or the runtime does not support the call.
pub(crate) const fn is_unsupported(status: aclError) -> bool {
    matches!(
        status,
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT
            | ACL_ERROR_API_NOT_SUPPORT
            | ACL_ERROR_FEATURE_UNSUPPORTED
            | MISSING
    )
}

/// Returns whether the status means that memory is exhausted.
pub(crate) const fn is_out_of_memory(status: aclError) -> bool {
    matches!(status, ACL_ERROR_BAD_ALLOC | ACL_ERROR_RT_MEMORY_ALLOCATION | ACL_ERROR_RT_DEVICE_OOM)
}

/// Returns the remedy for a status of any call, or an empty text. Calls with more context have hints of their own.
pub(crate) const fn hint(status: VendorStatus) -> &'static str {
    match status.0 {
        ACL_ERROR_UNINITIALIZE => {
            "Code of this process called aclFinalize while device memory was in use; call it last, or not at all"
        }
        ACL_ERROR_RT_CONTEXT_NULL => {
            "The device's context was destroyed: code of this process reset the device (aclrtResetDevice, \
             aclrtResetDeviceForce) or called aclFinalize"
        }
        ACL_ERROR_RT_STREAM_CONTEXT => {
            "The stream belongs to another context (aclrtCreateContext); streams must belong to the device's default \
             context, the one of aclrtSetDevice"
        }
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT | ACL_ERROR_API_NOT_SUPPORT | ACL_ERROR_FEATURE_UNSUPPORTED => {
            "This chip, driver or CANN version does not support the call; sharing memory requires CANN 8.3.RC1 or newer, \
             and Ascend HDK (driver and firmware) 25.3.RC1 or newer"
        }
        ACL_ERROR_RT_NO_EVENT_RESOURCE => "Too many events are in use on the device",
        ACL_ERROR_RT_NO_STREAM_RESOURCE => "Too many streams are in use on the device",
        ACL_ERROR_RT_DRV_INTERNAL_ERROR => {
            "The status has no details; check the driver's log, ~/ascend/log/debug/plog (ASCEND_PROCESS_LOG_PATH), and \
             dmesg"
        }
        ACL_ERROR_RT_DEVICE_MEM_ERROR | ACL_ERROR_RT_LINK_ERROR | ACL_ERROR_RT_SUSPECT_REMOTE_ERROR => {
            "A hardware error, or memory of another process that has exited or revoked it: check npu-smi info and dmesg"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_status_has_a_name_and_unknown_has_none() {
        assert_eq!(name(VendorStatus(0)), Some("ACL_SUCCESS"));
        assert_eq!(name(VendorStatus(100_039)), Some("ACL_ERROR_COMPILING_STUB_MODE"));
        assert_eq!(name(VendorStatus(507_899)), Some("ACL_ERROR_RT_DRV_INTERNAL_ERROR"));
        assert_eq!(name(VendorStatus(4242)), None);
        assert_eq!(name(VendorStatus(MISSING)), None);
        assert_eq!(hint(VendorStatus(4242)), "");
    }

    #[test]
    fn status_is_classified_by_its_number() {
        assert!(is_unsupported(207_000) && is_unsupported(MISSING) && !is_unsupported(507_899));
        assert!(is_out_of_memory(207_001) && is_out_of_memory(207_018) && !is_out_of_memory(0));
        assert!(hint(VendorStatus(207_000)).contains("25.3.RC1"));
    }
}
