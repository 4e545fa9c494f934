//! Launches of the addition kernel, which each device loads once.

use std::sync::PoisonError;

use device_ipc_core::{DeviceOrdinal, DeviceRange, Error, Result};

use crate::bindings::api::Stream;
use crate::objects::driver::Driver;
use crate::objects::kernel::Kernel;

impl Driver {
    /// Adds `value` to every float of `range`, on a stream of `device`.
    ///
    /// # Safety
    ///
    /// The stream is of `device`, which can access the range; the range stays mapped until the kernel has finished.
    pub(crate) unsafe fn launch_add_f32(
        &self,
        range: DeviceRange,
        value: f32,
        device: DeviceOrdinal,
        stream: Stream,
    ) -> Result<()> {
        if !range.len.is_multiple_of(4) || !range.ptr.get().is_multiple_of(4) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} are not whole, aligned 32-bit floats",
                range.len, range.ptr
            )));
        }
        let count = range.len / 4;
        if count == 0 {
            return Ok(());
        }
        let _current = self.enter(device)?;
        let kernel = self.add_f32_kernel(device)?;
        // SAFETY: the kernel is of the device's context, which is current; stream and range are as the caller promised.
        unsafe { kernel.launch(self, range.ptr.get(), count, value, stream) }
    }

    /// Loads the kernel on a device.
    pub(crate) fn load_add_f32(&self, device: DeviceOrdinal) -> Result<()> {
        let _current = self.enter(device)?;
        self.add_f32_kernel(device).map(drop)
    }

    /// Returns the kernel of a device whose context is current.
    fn add_f32_kernel(&self, device: DeviceOrdinal) -> Result<&Kernel> {
        let slot = &self.device(device)?.add_f32;
        if let Some(kernel) = slot.get() {
            return Ok(kernel);
        }
        let _creating = self.creating.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = slot.get() {
            return Ok(kernel);
        }
        let kernel = Kernel::load(self)?;
        Ok(slot.get_or_init(|| kernel))
    }
}
