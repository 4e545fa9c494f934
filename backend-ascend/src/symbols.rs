//! The required functions.
//!
//! The headers of ACL 1.15 already declare them; all other functions are optional. `include/acl.py` checks this
//! list against two generations of the vendor's headers.

/// The functions required for any use. A library that lacks one of them is too old, or not an ACL.
pub(crate) const REQUIRED: &[&str] = &[
    "aclInit",
    "aclGetRecentErrMsg",
    "aclrtGetVersion",
    "aclrtGetSocName",
    "aclrtGetDeviceCount",
    "aclrtSetDevice",
    "aclrtResetDevice",
    "aclrtSetCurrentContext",
    "aclrtGetCurrentContext",
    "aclrtSynchronizeDevice",
    "aclrtDeviceCanAccessPeer",
    "aclrtDeviceEnablePeerAccess",
    "aclrtGetMemInfo",
    "aclrtMallocAlign32",
    "aclrtFree",
    "aclrtMallocHost",
    "aclrtFreeHost",
    "aclrtPointerGetAttributes",
    "aclrtMemcpyAsync",
    "aclrtMemsetAsync",
    "aclrtCreateStream",
    "aclrtDestroyStream",
    "aclrtSynchronizeStream",
    "aclrtSynchronizeStreamWithTimeout",
    "aclrtStreamQuery",
    "aclrtStreamWaitEvent",
    "aclrtCreateEventExWithFlag",
    "aclrtDestroyEvent",
    "aclrtRecordEvent",
    "aclrtQueryEventStatus",
];

/// The functions required to share memory by key. A library that lacks one of them is older than CANN 8.3.RC1.
pub(crate) const SHARING: &[&str] = &[
    "aclrtIpcMemGetExportKey",
    "aclrtIpcMemImportByKey",
    "aclrtIpcMemSetImportPid",
    "aclrtIpcMemClose",
    "aclrtDeviceGetBareTgid",
];
