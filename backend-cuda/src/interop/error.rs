//! Conversion of cudarc's errors.

use cudarc::driver::DriverError;
use device_ipc_core::Error;
use device_ipc_core::backend::{VendorError, VendorStatus};

use crate::library::{NAME, status};

/// Returns the error of a call that cudarc made. Without cudarc's text, whose query can panic.
pub(super) fn vendor_error(call: &'static str, error: DriverError) -> Error {
    let status = VendorStatus(error.0 as i32);
    VendorError::new(NAME, call, status, status::name(status).unwrap_or("unknown status"))
        .with_hint(status::hint(status))
        .into()
}
