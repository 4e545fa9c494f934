//! The loaded and initialised driver: functions, devices, and what is made once per device.
//!
//! It is shared by the backend and by every event and stream, so that each of them can be dropped in any order; with
//! the last of them the primary contexts are released.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::fs;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use device_ipc_core::{
    BorrowedStream, DeviceOrdinal, Error, Result, Unavailable, VendorError, VendorStatus, environment,
};
use libloading::Library;

use crate::api::{Api, Stream};
use crate::device::Device;
use crate::host_pages::RegisteredPages;
use crate::status::{self, number};
use crate::{NAME, library};

/// The driver.
pub(crate) struct Driver {
    pub(crate) api: Api,
    pub(crate) devices: Vec<Device>,
    /// Which device reaches the memory of which: as many for each device as there are.
    pub(crate) peers: Vec<OnceLock<bool>>,
    /// Held while a device gets what it has once: its context, its kernel.
    pub(crate) making: Mutex<()>,
    /// The host memory that streams write and wait on.
    pub(crate) registered: RegisteredPages,
    pub(crate) file: String,
    cuda_version: i32,
    /// Never unloaded: libcuda has threads of its own once it is initialised, and others in this process use it too.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("file", &self.file)
            .field("version", &self.version())
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// Loads libcuda, initialises it and lists the devices. Creates no context.
    pub(crate) fn load(path: Option<&Path>) -> Result<Arc<Self>, Unavailable> {
        let library::Loaded { library, api, file } = library::load(path)?;
        let mut driver = Self {
            api,
            devices: Vec::new(),
            peers: Vec::new(),
            making: Mutex::new(()),
            registered: RegisteredPages::default(),
            file,
            cuda_version: 0,
            _library: ManuallyDrop::new(library),
        };
        // SAFETY: the only flags that exist are 0.
        driver.started("cuInit", unsafe { (driver.api.init)(0) })?;
        // SAFETY: writes one int.
        let status = unsafe { (driver.api.driver_get_version)(&raw mut driver.cuda_version) };
        driver.started("cuDriverGetVersion", status)?;
        if driver.cuda_version < library::OLDEST_CUDA {
            return Err(Unavailable::TooOld {
                library: driver.file.clone(),
                missing: format!("support for CUDA 11.4 (it is of {})", cuda(driver.cuda_version)),
                needed: library::OLDEST_DRIVER.into(),
            });
        }
        driver.devices = Device::list(&driver)?;
        if driver.devices.is_empty() {
            return Err(Unavailable::NoDevice { detail: no_device("cuDeviceGetCount counts none") });
        }
        driver.peers.resize_with(driver.devices.len().pow(2), OnceLock::new);
        tracing::debug!(
            library = driver.file,
            version = driver.version(),
            devices = driver.devices.len(),
            "CUDA loaded"
        );
        Ok(Arc::new(driver))
    }

    /// The versions, in words.
    pub(crate) fn version(&self) -> String {
        // Absent in some sandboxes; the CUDA version is what matters.
        match fs::read_to_string("/sys/module/nvidia/version") {
            Ok(driver) => format!("driver {}, {}", driver.trim(), cuda(self.cuda_version)),
            Err(_) => cuda(self.cuda_version),
        }
    }

    /// The device of this ordinal.
    pub(crate) fn device(&self, ordinal: DeviceOrdinal) -> Result<&Device> {
        self.devices.get(ordinal.index()).ok_or(Error::NoSuchDevice {
            backend: NAME,
            ordinal,
            count: self.devices.len(),
        })
    }

    /// The driver's handle of a stream, if it is one of this backend on a device that there is.
    pub(crate) fn stream(&self, stream: BorrowedStream<'_>) -> Result<Stream> {
        if stream.backend() != NAME {
            return Err(Error::WrongBackend {
                what: "the stream",
                found: stream.backend().to_owned(),
                expected: NAME.to_owned(),
            });
        }
        self.device(stream.device())?;
        Ok(Stream(stream.raw() as usize))
    }

    /// Success, or the error of `call` with the usual hint for its status.
    pub(crate) fn check(&self, call: &'static str, status: i32) -> Result<()> {
        if status == number::SUCCESS { Ok(()) } else { Err(self.error(call, status, "")) }
    }

    /// The error of `call`, with `hint`, or where that is empty the usual hint for the status.
    pub(crate) fn error(&self, call: &'static str, status: i32, hint: &str) -> Error {
        self.vendor_error(call, status, hint).into()
    }

    fn vendor_error(&self, call: &'static str, status: i32, hint: &str) -> VendorError {
        let name = status::name(VendorStatus(status)).map(str::to_owned);
        let name = name.or_else(|| self.text(self.api.get_error_name, status));
        VendorError {
            backend: NAME,
            call,
            status: VendorStatus(status),
            name: name.unwrap_or_else(|| "unknown status".to_owned()),
            message: self.text(self.api.get_error_string, status).unwrap_or_default(),
            hint: if hint.is_empty() {
                status::hint(VendorStatus(status)).to_owned()
            } else {
                hint.to_owned()
            },
        }
    }

    fn text(&self, function: Option<Describe>, status: i32) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: `cuGetErrorName` and `cuGetErrorString` write one pointer, null for a number they do not know.
        let result = unsafe { function?(status, &raw mut text) };
        if result != number::SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: not null, so a NUL-terminated text that lives as long as the library.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// Success, or why the driver cannot be used.
    pub(crate) fn started(&self, call: &'static str, status: i32) -> Result<(), Unavailable> {
        let hint = match status {
            number::SUCCESS => return Ok(()),
            number::ERROR_NO_DEVICE => {
                let detail = no_device(&format!("{call} says CUDA_ERROR_NO_DEVICE (100)"));
                return Err(Unavailable::NoDevice { detail });
            }
            number::ERROR_STUB_LIBRARY => {
                return Err(Unavailable::StubLibrary {
                    library: self.file.clone(),
                    hint:
                        "take the toolkit's lib64/stubs out of LD_LIBRARY_PATH, and install the NVIDIA driver"
                            .into(),
                });
            }
            number::ERROR_UNKNOWN => {
                "The kernel's driver cannot be reached: see whether nvidia-smi works, whether nvidia-uvm is loaded \
                 (nvidia-modprobe -u), and in a container whether /dev/nvidia* are there"
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
    }
}

type Describe = unsafe extern "C" fn(i32, *mut *const c_char) -> i32;

/// `1000 * major + 10 * minor`, as `cuDriverGetVersion` tells it.
fn cuda(version: i32) -> String {
    format!("CUDA {}.{}", version / 1000, version % 1000 / 10)
}

fn no_device(what: &str) -> String {
    match environment::variable("CUDA_VISIBLE_DEVICES") {
        Some(value) => format!("{what}; CUDA_VISIBLE_DEVICES is {value:?}, which may hide those there are"),
        None => format!("{what}; see nvidia-smi -L, and in a container start it with --gpus all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_people_know_them() {
        assert_eq!(cuda(13_000), "CUDA 13.0");
        assert_eq!(cuda(12_090), "CUDA 12.9");
        assert_eq!(cuda(11_040), "CUDA 11.4");
    }
}
