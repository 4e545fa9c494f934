//! The vendor's error numbers.
//!
//! Programs act on these numbers only. Numbers and names are those of `acl_base_rt.h` and `rt_error_codes.h`.

use device_ipc_mock_engine::EngineError;

/// An `aclError`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub i32);

#[allow(missing_docs, reason = "the names are the vendor's")]
impl Status {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_PARAM: Self = Self(100_000);
    pub const UNINITIALIZE: Self = Self(100_001);
    pub const REPEAT_INITIALIZE: Self = Self(100_002);
    pub const INVALID_FILE: Self = Self(100_003);
    pub const REPEAT_FINALIZE: Self = Self(100_037);
    pub const COMPILING_STUB_MODE: Self = Self(100_039);
    pub const RT_PARAM_INVALID: Self = Self(107_000);
    pub const RT_INVALID_DEVICEID: Self = Self(107_001);
    pub const RT_CONTEXT_NULL: Self = Self(107_002);
    pub const RT_STREAM_CONTEXT: Self = Self(107_003);
    pub const RT_EVENT_TIMESTAMP_INVALID: Self = Self(107_006);
    pub const RT_ADDR_UNALIGNED: Self = Self(107_008);
    pub const RT_STREAM_SUBSCRIBE: Self = Self(107_011);
    pub const RT_THREAD_SUBSCRIBE: Self = Self(107_012);
    pub const RT_STREAM_NO_CB_REG: Self = Self(107_015);
    pub const RT_INVALID_HANDLE: Self = Self(107_017);
    pub const RT_TASK_TIMEOUT: Self = Self(107_020);
    pub const RT_STREAM_ABORT: Self = Self(107_023);
    pub const FEATURE_UNSUPPORTED: Self = Self(200_006);
    pub const RT_FEATURE_NOT_SUPPORT: Self = Self(207_000);
    pub const RT_MEMORY_ALLOCATION: Self = Self(207_001);
    pub const RT_NO_NOTIFY_RESOURCE: Self = Self(207_009);
    pub const RT_NO_PERMISSION: Self = Self(207_006);
    pub const INTERNAL_ERROR: Self = Self(500_000);
    pub const RT_INTERNAL_ERROR: Self = Self(507_000);
    pub const RT_REPORT_TIMEOUT: Self = Self(507_012);
    pub const RT_AICORE_EXCEPTION: Self = Self(507_015);
    pub const RT_DEV_SETUP_ERROR: Self = Self(507_033);
    pub const RT_VECTOR_CORE_EXCEPTION: Self = Self(507_035);
    pub const RT_STREAM_SYNC_TIMEOUT: Self = Self(507_046);
    pub const RT_EVENT_SYNC_TIMEOUT: Self = Self(507_047);
    pub const RT_DEVICE_MEM_ERROR: Self = Self(507_053);
    pub const RT_SUSPECT_REMOTE_ERROR: Self = Self(507_057);
    pub const RT_DRV_INTERNAL_ERROR: Self = Self(507_899);
    pub const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(507_910);
    pub const HOST_MEMORY_NOT_REGISTERED: Self = Self(507_911);
}

/// A status, and the text for `aclGetRecentErrMsg`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: Status,
    pub(crate) detail: String,
}

/// The result of a call.
pub(crate) type Outcome<T = ()> = Result<T, Refusal>;

/// Fails with a status and a reason.
pub(crate) fn refuse<T>(status: Status, detail: impl Into<String>) -> Outcome<T> {
    Err(Refusal { status, detail: detail.into() })
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        Self { status: status_of(&error), detail: error.to_string() }
    }
}

/// Most failures of the driver are its general error 507899 (hicann/runtime, `errcode_manage.cc`).
fn status_of(error: &EngineError) -> Status {
    match error {
        EngineError::InvalidDevice { .. } => Status::RT_INVALID_DEVICEID,
        EngineError::InvalidValue { .. }
        | EngineError::UnknownAddress { .. }
        | EngineError::NotBase { .. }
        | EngineError::Imported { .. }
        | EngineError::NotImported { .. }
        | EngineError::OutOfRange { .. } => Status::RT_PARAM_INVALID,
        EngineError::Misaligned { .. } => Status::RT_ADDR_UNALIGNED,
        EngineError::OutOfMemory { .. } => Status::RT_MEMORY_ALLOCATION,
        EngineError::Revoked { .. } | EngineError::PeerLost { .. } => Status::RT_SUSPECT_REMOTE_ERROR,
        EngineError::IllegalAddress { .. } => Status::RT_DEVICE_MEM_ERROR,
        EngineError::ReadOnly { .. } | EngineError::RecordFailed => Status::RT_AICORE_EXCEPTION,
        EngineError::InvalidStream { .. }
        | EngineError::InvalidEvent { .. }
        | EngineError::InvalidBlock { .. } => Status::RT_INVALID_HANDLE,
        EngineError::NotSupported { .. } => Status::RT_FEATURE_NOT_SUPPORT,
        EngineError::TimedOut => Status::RT_TASK_TIMEOUT,
        EngineError::Cancelled => Status::RT_STREAM_ABORT,
        EngineError::Injected { code, .. } => Status(*code),
        EngineError::Forked => Status::RT_DEV_SETUP_ERROR,
        EngineError::HostFunctionPanicked | EngineError::NotPermitted { .. } => Status::RT_INTERNAL_ERROR,
        _ => Status::RT_DRV_INTERNAL_ERROR,
    }
}
