//! The loaded libcuda: its functions, and the errors of its statuses. Knows no device.

pub(crate) mod fd;
pub(crate) mod search;
pub(crate) mod status;

use std::ffi::{CStr, c_char};
use std::fmt;
use std::fs;
use std::mem::ManuallyDrop;
use std::path::Path;

use device_ipc_core::backend::{Unavailable, VendorError, VendorStatus, environment};
use device_ipc_core::{Error, Result};
use libloading::Library;

use crate::bindings::api::{Api, EVENT_DISABLE_TIMING, Event};
use search::{Loaded, OLDEST_CUDA, OLDEST_DRIVER};
use status::number;

/// The backend's name, in descriptors and in `DEVICE_IPC_BACKEND`.
pub const NAME: &str = "cuda";

/// libcuda, loaded and initialised.
pub(crate) struct CudaLibrary {
    pub(crate) api: Api,
    pub(crate) file: String,
    cuda_version: i32,
    /// Never unloaded: an initialised libcuda runs threads, and other code of the process uses it too.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for CudaLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaLibrary")
            .field("file", &self.file)
            .field("version", &self.version())
            .finish_non_exhaustive()
    }
}

impl CudaLibrary {
    /// Loads libcuda from `path`, or from where it is installed, and initialises it.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self, Unavailable> {
        let Loaded { library, api, file } = search::load(path)?;
        let mut this = Self { api, file, cuda_version: 0, _library: ManuallyDrop::new(library) };
        let mut count = 0;
        // SAFETY: writes one int.
        if unsafe { (this.api.device_get_count)(&raw mut count) } != number::SUCCESS {
            // Not if other code of the process has done it: each call takes milliseconds (3 ms with driver 580.159.04).
            // SAFETY: `cuInit` accepts no flags but 0.
            this.check_startup("cuInit", unsafe { (this.api.init)(0) })?;
        }
        // SAFETY: writes one int.
        let status = unsafe { (this.api.driver_get_version)(&raw mut this.cuda_version) };
        this.check_startup("cuDriverGetVersion", status)?;
        if this.cuda_version < OLDEST_CUDA {
            return Err(Unavailable::TooOld {
                library: this.file,
                missing: format!("support for CUDA 11.4 (it supports {})", cuda(this.cuda_version)),
                needed: OLDEST_DRIVER.into(),
            });
        }
        Ok(this)
    }

    /// Returns the versions of the kernel driver and of CUDA as text.
    pub(crate) fn version(&self) -> String {
        // Absent in some sandboxes; the CUDA version is what matters.
        match fs::read_to_string("/sys/module/nvidia/version") {
            Ok(driver) => format!("driver {}, {}", driver.trim(), cuda(self.cuda_version)),
            Err(_) => cuda(self.cuda_version),
        }
    }

    /// Returns the error of `call` with the usual hint for `status`, unless `status` is success.
    pub(crate) fn check(&self, call: &'static str, status: i32) -> Result<()> {
        if status == number::SUCCESS { Ok(()) } else { Err(self.error(call, status, "")) }
    }

    /// Creates an event of the current context and of this process alone. It can be recorded repeatedly; a wait takes the record before it.
    pub(crate) fn create_local_event(&self) -> Result<Event> {
        let mut event = Event::NULL;
        // SAFETY: writes one event.
        let status = unsafe { (self.api.event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        self.check("cuEventCreate", status)?;
        Ok(event)
    }

    /// Returns the error of `call` with `hint`; an empty `hint` stands for the usual one of the status.
    pub(crate) fn error(&self, call: &'static str, status: i32, hint: &str) -> Error {
        self.vendor_error(call, status, hint).into()
    }

    fn vendor_error(&self, call: &'static str, status: i32, hint: &str) -> VendorError {
        let name = status::name(VendorStatus(status)).map(str::to_owned);
        let name = name.or_else(|| self.text(self.api.get_error_name, status));
        VendorError::new(
            NAME,
            call,
            VendorStatus(status),
            name.unwrap_or_else(|| "unknown status".to_owned()),
        )
        .with_message(self.text(self.api.get_error_string, status).unwrap_or_default())
        .with_hint(if hint.is_empty() {
            status::hint(VendorStatus(status)).to_owned()
        } else {
            hint.to_owned()
        })
    }

    fn text(&self, function: Option<StatusText>, status: i32) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: `cuGetErrorName` and `cuGetErrorString` write one pointer, null for an unknown status.
        let result = unsafe { function?(status, &raw mut text) };
        if result != number::SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: not null, so a NUL-terminated text that lives as long as the library.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// Returns why CUDA is unavailable, unless `status` is success.
    pub(crate) fn check_startup(&self, call: &'static str, status: i32) -> Result<(), Unavailable> {
        let hint = match status {
            number::SUCCESS => return Ok(()),
            number::ERROR_NO_DEVICE => {
                let detail = no_device(&format!("{call} returned CUDA_ERROR_NO_DEVICE (100)"));
                return Err(Unavailable::NoDevice { detail });
            }
            number::ERROR_STUB_LIBRARY => {
                return Err(Unavailable::StubLibrary {
                    library: self.file.clone(),
                    hint:
                        "remove the toolkit's lib64/stubs from LD_LIBRARY_PATH and install the NVIDIA driver"
                            .into(),
                });
            }
            number::ERROR_UNKNOWN => {
                "The kernel driver cannot be reached: check that nvidia-smi works, that nvidia-uvm is loaded \
                 (nvidia-modprobe -u), and in a container that /dev/nvidia* exist"
            }
            _ => "",
        };
        Err(Unavailable::Failed { detail: self.vendor_error(call, status, hint).to_string() })
    }
}

type StatusText = unsafe extern "C" fn(i32, *mut *const c_char) -> i32;

/// Formats `1000 * major + 10 * minor`, the encoding of `cuDriverGetVersion`.
fn cuda(version: i32) -> String {
    format!("CUDA {}.{}", version / 1000, version % 1000 / 10)
}

/// Returns the detail of [`Unavailable::NoDevice`]: the failure, then the likely cause.
pub(crate) fn no_device(failure: &str) -> String {
    match environment::variable("CUDA_VISIBLE_DEVICES") {
        Some(value) => {
            format!("{failure}; CUDA_VISIBLE_DEVICES is {value:?}, which may hide the installed devices")
        }
        None => format!("{failure}; check nvidia-smi -L, and start a container with --gpus all"),
    }
}

/// Returns the error for a driver without functions that arrived with CUDA `since`.
pub(crate) fn too_old(what: &str, since: &str) -> Error {
    Error::Unsupported {
        backend: NAME,
        what: what.into(),
        why: format!("the driver lacks functions of CUDA {since}; update it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_version_is_formatted_as_major_and_minor() {
        assert_eq!(cuda(13_000), "CUDA 13.0");
        assert_eq!(cuda(12_090), "CUDA 12.9");
        assert_eq!(cuda(11_040), "CUDA 11.4");
    }
}
