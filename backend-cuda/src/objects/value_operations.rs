//! Stream memory operations: streams that write a word in host memory, and wait for its value ("Stream Memory
//! Operations", `group__CUDA__MEMOP`).

use std::ffi::{c_int, c_uint};

use device_ipc_core::{DeviceOrdinal, Error, Result};

use crate::bindings::api::{
    Api, DEVICE_ATTRIBUTE_FORMER_VALUE_OPERATIONS, DEVICE_ATTRIBUTE_VALUE_OPERATIONS, DevicePointer, Stream,
};
use crate::library::NAME;
use crate::library::status::number;
use crate::objects::driver::Driver;

type Operation = unsafe extern "C" fn(Stream, DevicePointer, u64, c_uint) -> i32;

/// The two operations, in the newest form of this driver.
#[derive(Clone, Copy)]
pub(crate) struct ValueOperations {
    pub(crate) write: Operation,
    pub(crate) wait: Operation,
    /// The device attribute that reports support.
    attribute: c_int,
}

impl ValueOperations {
    fn of(api: &Api) -> Option<Self> {
        let newest = api.value_operations.as_ref().map(|found| Self {
            write: found.write,
            wait: found.wait,
            attribute: DEVICE_ATTRIBUTE_VALUE_OPERATIONS,
        });
        newest.or_else(|| {
            api.former_value_operations.as_ref().map(|found| Self {
                write: found.write,
                wait: found.wait,
                attribute: DEVICE_ATTRIBUTE_FORMER_VALUE_OPERATIONS,
            })
        })
    }
}

impl Driver {
    /// Returns whether streams of the device can write and wait on words.
    ///
    /// Trusts the device attribute: a trial would register and unregister pages, and for the latter the driver waits
    /// until all streams of the device are idle.
    pub(crate) fn has_timelines(&self, ordinal: DeviceOrdinal) -> Result<bool> {
        let device = self.device(ordinal)?;
        let Some(operations) = ValueOperations::of(&self.api) else { return Ok(false) };
        let mut supported: c_int = 0;
        // SAFETY: writes one int; an attribute that the driver does not know is an error.
        let status = unsafe {
            (self.api.device_get_attribute)(&raw mut supported, operations.attribute, device.handle)
        };
        Ok(status == number::SUCCESS && supported != 0 && self.api.host_pages.is_some())
    }

    /// Returns the operations.
    pub(crate) fn value_operations(&self) -> Result<ValueOperations> {
        ValueOperations::of(&self.api).ok_or_else(|| unsupported("write and wait on words"))
    }
}

/// Returns the error for a device without the operations.
pub(crate) fn unsupported(what: &str) -> Error {
    Error::Unsupported {
        backend: NAME,
        what: what.into(),
        why: "the device or its driver has no 64-bit stream memory operations (CUDA 11.7 or newer has them); order \
              work by events, or synchronise on the host"
            .into(),
    }
}
