//! Which functions there have to be.
//!
//! Those that the headers of ACL 1.15 declare already; every other one is looked up and may be missing. `cargo xtask
//! verify-abi` checks this list against two generations of the vendor's headers.

/// The functions without which nothing works. A library that lacks one of them is too old, or none of the vendor's.
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

/// The functions that sharing memory by key is made of. A library that lacks one of them is of CANN before 8.3.RC1.
pub(crate) const SHARING: &[&str] = &[
    "aclrtIpcMemGetExportKey",
    "aclrtIpcMemImportByKey",
    "aclrtIpcMemSetImportPid",
    "aclrtIpcMemClose",
    "aclrtDeviceGetBareTgid",
];
