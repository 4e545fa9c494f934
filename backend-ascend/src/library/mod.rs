//! The loaded ACL: its functions, and the errors of its statuses. Knows no device.
//!
//! The process may have another owner of the runtime (torch_npu). The configuration of the first `aclInit` applies to
//! the whole process, so this backend, which has none, calls it as late as possible: when a device's context is first
//! needed. Every later `aclInit` returns 100002 and is counted ("Initialization and Deinitialization" of the ACL
//! manual). `aclFinalize` terminates the runtime for every owner, so this backend never calls it;
//! `aclFinalizeReference` decrements the count, where the library has it. This backend calls it if another owner was
//! first. If this backend was first, its count stays: once the count is zero, an `aclInit` with a configuration would
//! be refused, since it differs from the first one (100000; `acl.cpp` of the runtime's sources).

pub(crate) mod search;
pub(crate) mod status;

use std::ffi::{CStr, c_char};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::OnceLock;

use device_ipc_core::backend::{Unavailable, VendorError, VendorStatus, environment};
use device_ipc_core::{Error, Result};

use crate::bindings::*;
use status::{MISSING, NEEDED};

/// The backend's name, in descriptors and in `DEVICE_IPC_BACKEND`.
pub const NAME: &str = "ascend";

/// The environment variable by which the runtime hides devices from a process, and renumbers them.
pub(crate) const VISIBLE_DEVICES: &str = "ASCEND_RT_VISIBLE_DEVICES";

/// Calls a function of the table; evaluates to [`MISSING`] if the library lacks it. For use in an `unsafe` block.
macro_rules! call {
    ($library:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match &$library.acl.$function {
            Ok(function) => function($($argument),*),
            Err(_) => $crate::library::status::MISSING,
        }
    };
}
pub(crate) use call;

/// ACL, loaded.
pub(crate) struct AclLibrary {
    /// Never unloaded: an initialised runtime runs threads, and other code of the process uses it too.
    pub(crate) acl: ManuallyDrop<Acl>,
    pub(crate) file: String,
    initialised: OnceLock<Initialisation>,
    version: String,
}

/// The outcome of `aclInit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Initialisation {
    /// It was the first in the process.
    First,
    /// Another owner was first, and the call was counted.
    Counted,
}

impl fmt::Debug for AclLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AclLibrary")
            .field("file", &self.file)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl AclLibrary {
    /// Loads ACL from `path`, or from where it is installed. Leaves `aclInit` to the first context.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self, Unavailable> {
        let search::Loaded { acl, file } = search::load(path)?;
        Ok(Self { acl: ManuallyDrop::new(acl), file, initialised: OnceLock::new(), version: String::new() })
    }

    /// Calls `aclInit` once, and returns its status; an earlier call of another owner is success.
    pub(crate) fn initialise(&self) -> aclError {
        if self.initialised.get().is_some() {
            return ACL_SUCCESS;
        }
        // SAFETY: a null path means the default configuration.
        let outcome = match unsafe { call!(self, aclInit(std::ptr::null())) } {
            ACL_SUCCESS => Initialisation::First,
            ACL_ERROR_REPEAT_INITIALIZE => Initialisation::Counted,
            status => return status,
        };
        tracing::debug!(target: crate::LOG, ?outcome, "initialised ACL");
        self.initialised.get_or_init(|| outcome);
        ACL_SUCCESS
    }

    /// Returns the state of `aclInit` as text.
    pub(crate) fn initialisation(&self) -> &'static str {
        match self.initialised.get() {
            None => "not called",
            Some(Initialisation::First) => "called first by this backend",
            Some(Initialisation::Counted) => "called before by another owner",
        }
    }

    /// Returns the versions of driver, CANN and ACL as text; empty before [`query_version`](Self::query_version).
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Queries the versions.
    pub(crate) fn query_version(&mut self) {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: writes three ints.
        let status = unsafe { call!(self, aclrtGetVersion(&raw mut major, &raw mut minor, &raw mut patch)) };
        let mut parts = Vec::new();
        if let Some(driver) = self.package_version(c"driver") {
            parts.push(format!("driver {driver}"));
        }
        if let Some(runtime) = self.package_version(c"runtime") {
            parts.push(format!("CANN {runtime}"));
        }
        if status == ACL_SUCCESS {
            parts.push(format!("ACL {major}.{minor}.{patch}"));
        }
        self.version = if parts.is_empty() { "unknown version".to_owned() } else { parts.join(", ") };
    }

    /// Returns the version of an installed package: `driver`, or a package of CANN ("Other APIs",
    /// `aclsysGetVersionStr`, which requires space for 128 bytes).
    pub(crate) fn package_version(&self, package: &CStr) -> Option<String> {
        // The function declares the name as writable, without a stated reason.
        let mut name = [0u8; 32];
        name.get_mut(..package.count_bytes())?.copy_from_slice(package.to_bytes());
        let mut text = [0u8; 256];
        // SAFETY: the name ends with a NUL, and the buffer is larger than the function requires.
        let status = unsafe {
            call!(
                self,
                aclsysGetVersionStr(name.as_mut_ptr().cast::<c_char>(), text.as_mut_ptr().cast::<c_char>())
            )
        };
        let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.trim();
        (status == ACL_SUCCESS && !text.is_empty()).then(|| text.to_owned())
    }

    /// Returns the error of `call` with the usual hint for `status`, unless `status` is success.
    pub(crate) fn check(&self, call: &'static str, status: aclError) -> Result<()> {
        if status == ACL_SUCCESS { Ok(()) } else { Err(self.error(call, status, "")) }
    }

    /// Creates an event of the current context and of this process alone. It can be recorded repeatedly: a wait takes the record before
    /// it. It is complete before its first record.
    pub(crate) fn create_local_event(&self) -> Result<aclrtEvent> {
        let mut event = aclrtEvent(std::ptr::null_mut());
        // SAFETY: writes one event.
        let status = unsafe { call!(self, aclrtCreateEventExWithFlag(&raw mut event, ACL_EVENT_SYNC)) };
        self.check("aclrtCreateEventExWithFlag", status)?;
        Ok(event)
    }

    /// Returns the error of `call` with `hint`; an empty `hint` stands for the usual one of the status.
    ///
    /// Must run on the thread that made the call, before its next one: the vendor's message is the thread's latest.
    pub(crate) fn error(&self, call: &'static str, status: aclError, hint: &str) -> Error {
        if status == MISSING {
            return Error::Unsupported {
                backend: NAME,
                what: format!("call {call}"),
                why: format!(
                    "{} ({}) does not have this function; install a newer CANN",
                    self.file, self.version
                ),
            };
        }
        self.vendor_error(call, status, hint).into()
    }

    fn vendor_error(&self, call: &'static str, status: aclError, hint: &str) -> VendorError {
        let name = status::name(VendorStatus(status)).unwrap_or("unknown status");
        VendorError::new(NAME, call, VendorStatus(status), name)
            .with_message(self.recent_message())
            .with_hint(if hint.is_empty() { status::hint(VendorStatus(status)) } else { hint })
    }

    /// Returns the runtime's latest message for the calling thread ("Error Reporting APIs", `aclGetRecentErrMsg`), in
    /// one line.
    pub(crate) fn recent_message(&self) -> String {
        let Ok(recent) = &self.acl.aclGetRecentErrMsg else { return String::new() };
        // SAFETY: takes no arguments; returns null or a text that is valid until the thread's next call.
        let text = unsafe { recent() };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, so a text that ends with a NUL.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Returns why Ascend is unavailable, unless `status` is success.
    pub(crate) fn check_startup(&self, call: &'static str, status: aclError) -> Result<(), Unavailable> {
        let hint = match status {
            ACL_SUCCESS => return Ok(()),
            // The stub prints a line for each call, so no further call is made.
            ACL_ERROR_COMPILING_STUB_MODE => {
                return Err(Unavailable::StubLibrary {
                    library: self.file.clone(),
                    hint: "remove CANN's devlib folder from LD_LIBRARY_PATH. CANN's set_env.sh adds it if it finds no \
                           driver: install the Ascend HDK (driver and firmware), or in a container mount \
                           /usr/local/Ascend/driver and the devices"
                        .into(),
                });
            }
            ACL_ERROR_RT_NO_DEVICE | ACL_ERROR_RT_INVALID_DEVICEID | ACL_ERROR_INVALID_DEVICE => {
                let error = self.vendor_error(call, status, "");
                return Err(Unavailable::NoDevice { detail: no_device(&error.to_string()) });
            }
            MISSING => {
                return Err(Unavailable::TooOld {
                    library: self.file.clone(),
                    missing: call.to_owned(),
                    needed: NEEDED.to_owned(),
                });
            }
            ACL_ERROR_RT_DRV_INTERNAL_ERROR | ACL_ERROR_DRV_FAILURE | ACL_ERROR_RT_DEV_SETUP_ERROR => {
                "The driver cannot be reached: check that npu-smi info works, and in a container that \
                 /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc exist and \
                 /usr/local/Ascend/driver is mounted"
            }
            _ => "",
        };
        Err(Unavailable::Failed { detail: self.vendor_error(call, status, hint).to_string() })
    }
}

impl Drop for AclLibrary {
    fn drop(&mut self) {
        if self.initialised.get() != Some(&Initialisation::Counted) {
            return;
        }
        let mut remaining = 0u64;
        // SAFETY: writes one number; reverts the `aclInit` of `initialise`; another owner's count remains.
        let status = unsafe { call!(self, aclFinalizeReference(&raw mut remaining)) };
        tracing::debug!(target: crate::LOG, status, remaining, "released the ACL runtime");
    }
}

/// Returns the detail of [`Unavailable::NoDevice`]: the failure, then the likely cause.
pub(crate) fn no_device(failure: &str) -> String {
    match environment::variable(VISIBLE_DEVICES) {
        Some(value) => {
            format!("{failure}; {VISIBLE_DEVICES} is {value:?}, which may hide the installed devices")
        }
        None => format!(
            "{failure}; check npu-smi info, and in a container that /dev/davinci* and /dev/davinci_manager exist"
        ),
    }
}
