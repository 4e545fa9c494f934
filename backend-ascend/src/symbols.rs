//! The table of functions, and the required ones.
//!
//! The headers of ACL 1.15 already declare them; all other functions are optional. `include/acl.py` checks this
//! list against two generations of the vendor's headers.

/// Makes the table of the functions that `bindings` declares.
macro_rules! functions {
    ($($(#[$doc:meta])* pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        /// The functions of a library, each with the reason if the library lacks it.
        pub struct Acl {
            $($(#[$doc])* pub $name: Result<
                unsafe extern "C" fn($($argument: $type),*) $(-> $result)?,
                libloading::Error,
            >,)*
            _library: libloading::Library,
        }

        impl Acl {
            /// Looks the functions up.
            ///
            /// # Safety
            ///
            /// The library's functions of these names have these signatures.
            pub unsafe fn from_library(library: libloading::Library) -> Self {
                Self {
                    // SAFETY: as the caller promised.
                    $($name: unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }.map(|symbol| *symbol),)*
                    _library: library,
                }
            }
        }
    };
}
pub(crate) use functions;

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
