//! NIXL's statuses: their names, and what to do about them.

use crate::bindings::Status;

pub(crate) const SUCCESS: Status = Status(0);
pub(crate) const IN_PROGRESS: Status = Status(1);
const INVALID_PARAM: Status = Status(-1);
const BACKEND: Status = Status(-2);
pub(crate) const INVALID_STATE: Status = Status(-3);
const EXCEPTION: Status = Status(-4);
const NO_TELEMETRY: Status = Status(-5);
const NOT_FOUND: Status = Status(-6);

/// Returns NIXL's name of a status.
pub(crate) fn name(status: Status) -> &'static str {
    match status {
        SUCCESS => "NIXL_CAPI_SUCCESS",
        IN_PROGRESS => "NIXL_CAPI_IN_PROG",
        INVALID_PARAM => "NIXL_CAPI_ERROR_INVALID_PARAM",
        BACKEND => "NIXL_CAPI_ERROR_BACKEND",
        INVALID_STATE => "NIXL_CAPI_ERROR_INVALID_STATE",
        EXCEPTION => "NIXL_CAPI_ERROR_EXCEPTION",
        NO_TELEMETRY => "NIXL_CAPI_ERROR_NO_TELEMETRY",
        NOT_FOUND => "NIXL_CAPI_ERROR_NOT_FOUND",
        _ => "unknown status",
    }
}

/// Returns what to do about the status of a call. The C API has no messages; NIXL logs the details.
pub(crate) fn hint(call: &str, status: Status) -> &'static str {
    match (call, status) {
        ("post_xfer_req" | "get_xfer_status", BACKEND | NOT_FOUND) => {
            "The exporter's process has terminated, or the connection to it was lost; check that the ports of its host \
             can be reached"
        }
        ("load_remote_md", _) => {
            "The metadata is not that of a compatible NIXL; install the same version on both hosts"
        }
        ("create_xfer_req", _) => {
            "The exporter's memory and this memory have no transport in common; check UCX_TLS on both hosts"
        }
        ("register_mem", _) => {
            "UCX cannot register the memory; device memory needs a UCX that is built for CUDA, and InfiniBand a \
             sufficient limit of locked memory (ulimit -l)"
        }
        _ => "NIXL writes the reason to standard error, with NIXL_LOG_LEVEL=DEBUG in detail",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_status_has_a_name_and_a_hint() {
        let names = (-8..3).map(|status| name(Status(status))).collect::<Vec<_>>();
        assert_eq!(names.iter().filter(|name| **name == "unknown status").count(), 3, "{names:?}");
        assert!(hint("get_xfer_status", Status(-7)).contains("NIXL_LOG_LEVEL"));
        assert!(hint("get_xfer_status", BACKEND).contains("terminated"));
    }
}
