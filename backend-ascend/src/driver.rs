//! The loaded and initialised runtime: functions, devices, and what is made once per device.
//!
//! It is shared by the backend and by every event and stream, so that each of them can be dropped in any order; with
//! the last of them the devices are given back.
//!
//! The process may have another owner of the runtime (torch_npu). The configuration of the first `aclInit` is the one of
//! the process, so this one, which has none, is made as late as possible: when a device's context is first needed. Every
//! later `aclInit` returns 100002 and is counted ("Initialization and Deinitialization" of the ACL manual). `aclFinalize`
//! ends the runtime for everybody, so it is never called here; `aclFinalizeReference` takes one count back, where the
//! library has it. It is called where another owner was first. Where this backend was first its count stays: with the last
//! count gone, an `aclInit` with a configuration would be refused from then on, since it differs from the first one (100000;
//! `acl.cpp` of the runtime's sources).

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use device_ipc_core::{
    BorrowedStream, DeviceOrdinal, Error, HandleKind, Result, Unavailable, VendorError, VendorStatus,
    environment,
};

use crate::allocations::Allocations;
use crate::bindings::*;
use crate::device::Device;
use crate::exports::Exports;
use crate::options::PidValidation;
use crate::peers::Peers;
use crate::status::{self, MISSING, NEEDED};
use crate::stream::RetiredStreams;
use crate::timelines::Registered;
use crate::{NAME, library};

/// Calls a function of the table; [`MISSING`] where the library lacks it. Stands in an `unsafe` block.
macro_rules! call {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match &$driver.acl.$function {
            Ok(function) => function($($argument),*),
            Err(_) => $crate::status::MISSING,
        }
    };
}
pub(crate) use call;

/// The runtime.
pub(crate) struct Driver {
    /// Never unloaded: the runtime has threads of its own once it is initialised, and others in this process use it too.
    pub(crate) acl: ManuallyDrop<Acl>,
    pub(crate) devices: Vec<Device>,
    /// Held while a device gets its context.
    pub(crate) making: Mutex<()>,
    initialised: OnceLock<Initialised>,
    pub(crate) file: String,
    pub(crate) validation: PidValidation,
    /// The kind that memory is allocated for where nobody asks for one.
    pub(crate) allocates: HandleKind,
    pub(crate) allocations: Allocations,
    pub(crate) exports: Exports,
    pub(crate) peers: Peers,
    pub(crate) retired: RetiredStreams,
    pub(crate) registered: Registered,
    version: String,
}

/// What `aclInit` came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Initialised {
    /// It was the first of the process.
    First,
    /// Another owner was first, and it was counted.
    Counted,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("file", &self.file)
            .field("version", &self.version)
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// Loads ACL and lists the devices. Creates no context, and leaves `aclInit` to the first one.
    pub(crate) fn load(
        path: Option<&Path>,
        validation: PidValidation,
        allocates: HandleKind,
    ) -> Result<Arc<Self>, Unavailable> {
        let library::Loaded { acl, file } = library::load(path)?;
        let mut driver = Self {
            acl: ManuallyDrop::new(acl),
            devices: Vec::new(),
            making: Mutex::new(()),
            initialised: OnceLock::new(),
            file,
            validation,
            allocates,
            allocations: Allocations::default(),
            exports: Exports::default(),
            peers: Peers::default(),
            retired: RetiredStreams::default(),
            registered: Registered::default(),
            version: String::new(),
        };
        driver.devices = Device::list(&driver)?;
        driver.version = driver.versions();
        if driver.devices.is_empty() {
            return Err(Unavailable::NoDevice { detail: no_device("aclrtGetDeviceCount counts none") });
        }
        tracing::debug!(
            library = driver.file,
            version = driver.version,
            devices = driver.devices.len(),
            "ACL loaded"
        );
        Ok(Arc::new(driver))
    }

    /// Calls `aclInit` once, and returns its status; another owner that was first is success.
    pub(crate) fn initialise(&self) -> aclError {
        if self.initialised.get().is_some() {
            return ACL_SUCCESS;
        }
        // SAFETY: a null path means the default configuration.
        let outcome = match unsafe { call!(self, aclInit(std::ptr::null())) } {
            ACL_SUCCESS => Initialised::First,
            ACL_ERROR_REPEAT_INITIALIZE => Initialised::Counted,
            status => return status,
        };
        tracing::debug!(?outcome, "initialised ACL");
        self.initialised.get_or_init(|| outcome);
        ACL_SUCCESS
    }

    /// What became of `aclInit` so far, in words.
    pub(crate) fn initialisation(&self) -> &'static str {
        match self.initialised.get() {
            None => "not called",
            Some(Initialised::First) => "the first of the process",
            Some(Initialised::Counted) => "made by another owner before",
        }
    }

    /// The versions, in words.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    fn versions(&self) -> String {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: writes three ints.
        let status = unsafe { call!(self, aclrtGetVersion(&raw mut major, &raw mut minor, &raw mut patch)) };
        let mut words = Vec::new();
        if let Some(driver) = self.package_version(c"driver") {
            words.push(format!("driver {driver}"));
        }
        if let Some(runtime) = self.package_version(c"runtime") {
            words.push(format!("CANN {runtime}"));
        }
        if status == ACL_SUCCESS {
            words.push(format!("ACL {major}.{minor}.{patch}"));
        }
        if words.is_empty() { "unknown version".to_owned() } else { words.join(", ") }
    }

    /// The version of an installed package: `driver`, or one of CANN's ("Other APIs", `aclsysGetVersionStr`, which
    /// asks for room for 128 bytes).
    pub(crate) fn package_version(&self, package: &CStr) -> Option<String> {
        // The function takes the name as writable, for no stated reason.
        let mut name = [0u8; 32];
        name.get_mut(..package.count_bytes())?.copy_from_slice(package.to_bytes());
        let mut text = [0u8; 256];
        // SAFETY: the name ends with a NUL, and the text has more room than the function asks for.
        let status = unsafe {
            call!(
                self,
                aclsysGetVersionStr(name.as_mut_ptr().cast::<c_char>(), text.as_mut_ptr().cast::<c_char>())
            )
        };
        let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.trim();
        (status == ACL_SUCCESS && !text.is_empty()).then(|| text.to_owned())
    }

    /// The device of this ordinal.
    pub(crate) fn device(&self, ordinal: DeviceOrdinal) -> Result<&Device> {
        self.devices.get(ordinal.index()).ok_or(Error::NoSuchDevice {
            backend: NAME,
            ordinal,
            count: self.devices.len(),
        })
    }

    /// The runtime's handle of a stream, if it is one of this backend on a device that there is.
    pub(crate) fn stream(&self, stream: BorrowedStream<'_>) -> Result<aclrtStream> {
        if stream.backend() != NAME {
            return Err(Error::WrongBackend {
                what: "the stream",
                found: stream.backend().to_owned(),
                expected: NAME.to_owned(),
            });
        }
        self.device(stream.device())?;
        Ok(aclrtStream(stream.raw() as usize as *mut c_void))
    }

    /// Success, or the error of `call` with the usual hint for its status.
    pub(crate) fn check(&self, call: &'static str, status: aclError) -> Result<()> {
        if status == ACL_SUCCESS { Ok(()) } else { Err(self.error(call, status, "")) }
    }

    /// The error of `call`, with `hint`, or where that is empty the usual hint for the status. To be asked for on the
    /// thread that made the call, before its next one: the vendor's message is the thread's latest.
    pub(crate) fn error(&self, call: &'static str, status: aclError, hint: &str) -> Error {
        if status == MISSING {
            return Error::Unsupported {
                backend: NAME,
                what: format!("call {call}"),
                why: format!("{} does not have it: a newer CANN does ({})", self.file, self.version),
            };
        }
        self.vendor_error(call, status, hint).into()
    }

    fn vendor_error(&self, call: &'static str, status: aclError, hint: &str) -> VendorError {
        let name = status::name(VendorStatus(status)).unwrap_or("unknown status");
        VendorError {
            backend: NAME,
            call,
            status: VendorStatus(status),
            name: name.to_owned(),
            message: self.recent_message(),
            hint: if hint.is_empty() { status::hint(VendorStatus(status)) } else { hint }.to_owned(),
        }
    }

    /// The calling thread's latest message of the runtime ("Error Reporting APIs", `aclGetRecentErrMsg`), in one line.
    pub(crate) fn recent_message(&self) -> String {
        let Ok(recent) = &self.acl.aclGetRecentErrMsg else { return String::new() };
        // SAFETY: takes nothing; gives null or a text that stays until the thread's next call.
        let text = unsafe { recent() };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, so a text that ends with a NUL.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Success, or why the runtime cannot be used.
    pub(crate) fn started(&self, call: &'static str, status: aclError) -> Result<(), Unavailable> {
        let hint = match status {
            ACL_SUCCESS => return Ok(()),
            // The stub prints a line for each call: it is asked nothing more.
            ACL_ERROR_COMPILING_STUB_MODE => {
                return Err(Unavailable::StubLibrary {
                    library: self.file.clone(),
                    hint: "take CANN's devlib folder out of LD_LIBRARY_PATH. CANN's set_env.sh adds it where it finds no \
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
                "The driver cannot be reached: see whether npu-smi info works, and in a container whether \
                 /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc are there and \
                 /usr/local/Ascend/driver is mounted"
            }
            _ => "",
        };
        Err(Unavailable::Failed { detail: self.vendor_error(call, status, hint).to_string() })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for device in &self.devices {
            device.release(self);
        }
        if self.initialised.get() != Some(&Initialised::Counted) {
            return;
        }
        let mut left = 0u64;
        // SAFETY: writes one number; takes back the `aclInit` of `initialise`; another owner's count is left.
        let status = unsafe { call!(self, aclFinalizeReference(&raw mut left)) };
        tracing::debug!(status, left, "gave the ACL runtime back");
    }
}

fn no_device(what: &str) -> String {
    match environment::variable(VISIBLE_DEVICES) {
        Some(value) => format!("{what}; {VISIBLE_DEVICES} is {value:?}, which may hide those there are"),
        None => format!(
            "{what}; see npu-smi info, and in a container whether /dev/davinci* and /dev/davinci_manager are there"
        ),
    }
}

/// By this the runtime hides devices from a process, and renumbers them.
pub(crate) const VISIBLE_DEVICES: &str = "ASCEND_RT_VISIBLE_DEVICES";
