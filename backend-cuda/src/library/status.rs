//! The statuses of libcuda, with names and hints.
//!
//! Numbers, not an enum: a driver newer than this crate returns numbers that are absent here, and they are errors like
//! any other. Names and meanings are those of `CUresult` in "Data types used by CUDA driver" (`group__CUDA__TYPES`).

use device_ipc_core::backend::VendorStatus;

macro_rules! statuses {
    ($($constant:ident = $number:literal,)*) => {
        #[allow(dead_code, reason = "the table is complete; the code uses some of it")]
        pub(crate) mod number {
            $(pub(crate) const $constant: i32 = $number;)*
        }

        /// Returns the name of a status, or `None` for an unknown one.
        pub(crate) const fn name(status: VendorStatus) -> Option<&'static str> {
            match status.0 {
                $($number => Some(concat!("CUDA_", stringify!($constant))),)*
                _ => None,
            }
        }
    };
}

statuses! {
    SUCCESS = 0,
    ERROR_INVALID_VALUE = 1,
    ERROR_OUT_OF_MEMORY = 2,
    ERROR_NOT_INITIALIZED = 3,
    ERROR_DEINITIALIZED = 4,
    ERROR_PROFILER_DISABLED = 5,
    ERROR_PROFILER_NOT_INITIALIZED = 6,
    ERROR_PROFILER_ALREADY_STARTED = 7,
    ERROR_PROFILER_ALREADY_STOPPED = 8,
    ERROR_STUB_LIBRARY = 34,
    ERROR_CALL_REQUIRES_NEWER_DRIVER = 36,
    ERROR_DEVICE_UNAVAILABLE = 46,
    ERROR_MULTICAST_RESOURCE_FULL = 47,
    ERROR_NO_DEVICE = 100,
    ERROR_INVALID_DEVICE = 101,
    ERROR_DEVICE_NOT_LICENSED = 102,
    ERROR_INVALID_IMAGE = 200,
    ERROR_INVALID_CONTEXT = 201,
    ERROR_CONTEXT_ALREADY_CURRENT = 202,
    ERROR_MAP_FAILED = 205,
    ERROR_UNMAP_FAILED = 206,
    ERROR_ARRAY_IS_MAPPED = 207,
    ERROR_ALREADY_MAPPED = 208,
    ERROR_NO_BINARY_FOR_GPU = 209,
    ERROR_ALREADY_ACQUIRED = 210,
    ERROR_NOT_MAPPED = 211,
    ERROR_NOT_MAPPED_AS_ARRAY = 212,
    ERROR_NOT_MAPPED_AS_POINTER = 213,
    ERROR_ECC_UNCORRECTABLE = 214,
    ERROR_UNSUPPORTED_LIMIT = 215,
    ERROR_CONTEXT_ALREADY_IN_USE = 216,
    ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    ERROR_INVALID_PTX = 218,
    ERROR_INVALID_GRAPHICS_CONTEXT = 219,
    ERROR_NVLINK_UNCORRECTABLE = 220,
    ERROR_JIT_COMPILER_NOT_FOUND = 221,
    ERROR_UNSUPPORTED_PTX_VERSION = 222,
    ERROR_JIT_COMPILATION_DISABLED = 223,
    ERROR_UNSUPPORTED_EXEC_AFFINITY = 224,
    ERROR_UNSUPPORTED_DEVSIDE_SYNC = 225,
    ERROR_CONTAINED = 226,
    ERROR_INSUFFICIENT_LOADER_VERSION = 227,
    ERROR_INVALID_SOURCE = 300,
    ERROR_FILE_NOT_FOUND = 301,
    ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302,
    ERROR_SHARED_OBJECT_INIT_FAILED = 303,
    ERROR_OPERATING_SYSTEM = 304,
    ERROR_INVALID_HANDLE = 400,
    ERROR_ILLEGAL_STATE = 401,
    ERROR_LOSSY_QUERY = 402,
    ERROR_NOT_FOUND = 500,
    ERROR_NOT_READY = 600,
    ERROR_ILLEGAL_ADDRESS = 700,
    ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    ERROR_LAUNCH_TIMEOUT = 702,
    ERROR_LAUNCH_INCOMPATIBLE_TEXTURING = 703,
    ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    ERROR_CONTEXT_IS_DESTROYED = 709,
    ERROR_ASSERT = 710,
    ERROR_TOO_MANY_PEERS = 711,
    ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    ERROR_HARDWARE_STACK_ERROR = 714,
    ERROR_ILLEGAL_INSTRUCTION = 715,
    ERROR_MISALIGNED_ADDRESS = 716,
    ERROR_INVALID_ADDRESS_SPACE = 717,
    ERROR_INVALID_PC = 718,
    ERROR_LAUNCH_FAILED = 719,
    ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    ERROR_TENSOR_MEMORY_LEAK = 721,
    ERROR_NOT_PERMITTED = 800,
    ERROR_NOT_SUPPORTED = 801,
    ERROR_SYSTEM_NOT_READY = 802,
    ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
    ERROR_MPS_CONNECTION_FAILED = 805,
    ERROR_MPS_RPC_FAILURE = 806,
    ERROR_MPS_SERVER_NOT_READY = 807,
    ERROR_MPS_MAX_CLIENTS_REACHED = 808,
    ERROR_MPS_MAX_CONNECTIONS_REACHED = 809,
    ERROR_MPS_CLIENT_TERMINATED = 810,
    ERROR_CDP_NOT_SUPPORTED = 811,
    ERROR_CDP_VERSION_MISMATCH = 812,
    ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    ERROR_STREAM_CAPTURE_MERGE = 902,
    ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    ERROR_STREAM_CAPTURE_UNJOINED = 904,
    ERROR_STREAM_CAPTURE_ISOLATION = 905,
    ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    ERROR_CAPTURED_EVENT = 907,
    ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    ERROR_TIMEOUT = 909,
    ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
    ERROR_EXTERNAL_DEVICE = 911,
    ERROR_INVALID_CLUSTER_SIZE = 912,
    ERROR_FUNCTION_NOT_LOADED = 913,
    ERROR_INVALID_RESOURCE_TYPE = 914,
    ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
    ERROR_KEY_ROTATION = 916,
    ERROR_STREAM_DETACHED = 917,
    ERROR_GRAPH_RECAPTURE_FAILURE = 918,
    ERROR_FABRIC_NOT_READY = 919,
    ERROR_UNKNOWN = 999,
}

/// Returns the remedy for a status of any call, or an empty text. Calls with more context have hints of their own.
pub(crate) const fn hint(status: VendorStatus) -> &'static str {
    use number::*;
    match status.0 {
        ERROR_NOT_INITIALIZED => {
            "CUDA does not work after fork: spawn the process that uses it (multiprocessing has the start method \
             \"spawn\" for that)"
        }
        ERROR_DEINITIALIZED => "The process is exiting; release device memory before main returns",
        ERROR_DEVICE_UNAVAILABLE => {
            "Another process uses the device exclusively: check the compute mode in nvidia-smi -q -d COMPUTE"
        }
        ERROR_ILLEGAL_ADDRESS
        | ERROR_ASSERT
        | ERROR_HARDWARE_STACK_ERROR
        | ERROR_ILLEGAL_INSTRUCTION
        | ERROR_MISALIGNED_ADDRESS
        | ERROR_INVALID_ADDRESS_SPACE
        | ERROR_INVALID_PC
        | ERROR_LAUNCH_FAILED
        | ERROR_LAUNCH_TIMEOUT => {
            "An earlier kernel of this process failed, and every later call in its context fails; find the kernel with \
             compute-sanitizer, and restart the process"
        }
        ERROR_CONTEXT_IS_DESTROYED => {
            "Code of this process reset the device's primary context (cudaDeviceReset, cuDevicePrimaryCtxReset)"
        }
        ERROR_ECC_UNCORRECTABLE | ERROR_NVLINK_UNCORRECTABLE | ERROR_CONTAINED => {
            "Hardware error: check dmesg (Xid) and nvidia-smi -q"
        }
        ERROR_JIT_COMPILER_NOT_FOUND => {
            "The driver's library libnvidia-ptxjitcompiler.so.1 is missing; in a container set \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        }
        ERROR_OPERATING_SYSTEM => {
            "The operating system refused a request: a pid namespace needs its own /proc (unshare --pid --fork \
             --mount-proc), and the limit of open files may be too low (ulimit -n)"
        }
        ERROR_SYSTEM_NOT_READY => {
            "The machine's GPUs are not ready; if NVSwitch connects them, start nvidia-fabricmanager"
        }
        ERROR_SYSTEM_DRIVER_MISMATCH => {
            "libcuda and the kernel driver have different versions: restart after a driver update, or in a container \
             use the host's libcuda (nvidia-container-toolkit) instead of an installed one"
        }
        ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "This libcuda is of the forward-compatibility package, which supports data centre GPUs only: remove the \
             cuda-compat folder from LD_LIBRARY_PATH"
        }
        ERROR_MPS_CONNECTION_FAILED | ERROR_MPS_RPC_FAILURE | ERROR_MPS_SERVER_NOT_READY => {
            "The CUDA MPS daemon cannot be reached: check CUDA_MPS_PIPE_DIRECTORY and nvidia-cuda-mps-control"
        }
        ERROR_STREAM_CAPTURE_IMPLICIT => {
            "A stream that synchronises with the legacy default stream is being captured into a graph, and work on the \
             default stream would invalidate that capture: use another stream (cuStreamCreate), or wait until the \
             capture has ended"
        }
        ERROR_STREAM_CAPTURE_UNSUPPORTED => {
            "The stream is being captured into a graph; do this before or after the capture"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_status_has_a_name_and_unknown_has_none() {
        assert_eq!(name(VendorStatus(0)), Some("CUDA_SUCCESS"));
        assert_eq!(name(VendorStatus(201)), Some("CUDA_ERROR_INVALID_CONTEXT"));
        assert_eq!(name(VendorStatus(999)), Some("CUDA_ERROR_UNKNOWN"));
        assert_eq!(name(VendorStatus(31337)), None);
        assert_eq!(name(VendorStatus(-1)), None);
        assert_eq!(hint(VendorStatus(31337)), "");
    }
}
