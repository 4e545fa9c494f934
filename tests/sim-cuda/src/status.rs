//! The statuses of the driver, and the conversion of the engine's errors.
//!
//! Numbers and names are those of `cuda.h` (`CUresult`).

use device_ipc_mock_engine::EngineError;

/// A `CUresult`. A fault may inject a number that no header defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i32);

/// The result of a call.
pub(crate) type Result<T = ()> = std::result::Result<T, Status>;

macro_rules! statuses {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        #[allow(dead_code, reason = "a fault may ask for any of them, and each has a name")]
        impl Status {
            $(pub(crate) const $name: Self = Self($number);)*

            /// Returns the NUL-terminated name.
            pub(crate) fn name(self) -> Option<&'static str> {
                match self.0 {
                    0 => Some("CUDA_SUCCESS\0"),
                    $($number => Some(concat!("CUDA_ERROR_", stringify!($name), "\0")),)*
                    _ => None,
                }
            }

            /// Returns the NUL-terminated description.
            pub(crate) fn text(self) -> Option<&'static str> {
                match self.0 {
                    0 => Some("no error\0"),
                    $($number => Some(concat!($text, "\0")),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_IMAGE = 200, "device kernel image is invalid";
    INVALID_CONTEXT = 201, "invalid device context";
    MAP_FAILED = 205, "mapping of buffer object failed";
    ALREADY_MAPPED = 208, "resource already mapped";
    PEER_ACCESS_UNSUPPORTED = 217, "peer access is not supported between these two devices";
    INVALID_PTX = 218, "a PTX JIT compilation failed";
    UNSUPPORTED_PTX_VERSION = 222, "the provided PTX was compiled with an unsupported toolchain.";
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "invalid resource handle";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "peer access has not been enabled";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    MISALIGNED_ADDRESS = 716, "misaligned address";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999, "unknown error";
}

/// Converts the error of a call.
impl From<EngineError> for Status {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::InvalidDevice { .. } => Self::INVALID_DEVICE,
            EngineError::OutOfMemory { .. } => Self::OUT_OF_MEMORY,
            EngineError::OwnProcess => Self::INVALID_CONTEXT,
            EngineError::ExporterGone { .. }
            | EngineError::InvalidStream { .. }
            | EngineError::InvalidEvent { .. } => Self::INVALID_HANDLE,
            EngineError::PermissionDenied { .. } | EngineError::NotPermitted { .. } => Self::NOT_PERMITTED,
            EngineError::NoPeerAccess { .. } => Self::PEER_ACCESS_UNSUPPORTED,
            EngineError::NotSupported { .. } => Self::NOT_SUPPORTED,
            EngineError::Forked => Self::NOT_INITIALIZED,
            EngineError::System { .. } => Self::OPERATING_SYSTEM,
            _ => Self::INVALID_VALUE,
        }
    }
}

/// Returns the permanent status of a context whose work has failed.
pub(crate) fn sticky(error: &EngineError) -> Status {
    match error {
        EngineError::IllegalAddress { .. } | EngineError::ReadOnly { .. } => Status::ILLEGAL_ADDRESS,
        EngineError::Misaligned { .. } => Status::MISALIGNED_ADDRESS,
        _ => Status::LAUNCH_FAILED,
    }
}
