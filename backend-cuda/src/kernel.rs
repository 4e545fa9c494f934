//! The one kernel: a real computation for the suite and the examples, without a compiler on the machine.
//!
//! The driver compiles the PTX text when a device first needs it ("Module Management", `group__CUDA__MODULE`;
//! "Execution Control", `group__CUDA__EXEC`; the PTX ISA manual).

use std::ffi::{CStr, c_void};
use std::sync::PoisonError;

use device_ipc_core::{DeviceOrdinal, DeviceRange, Error, Result};

use crate::api::{Function, Module, Stream};
use crate::driver::Driver;
use crate::status::number;

const PTX: &str = concat!(include_str!("add_f32.ptx"), "\0");
const ENTRY: &CStr = c"device_ipc_add_f32";
const THREADS_PER_BLOCK: u32 = 256;
/// Enough to fill any device; the kernel walks on from there.
const MOST_BLOCKS: u64 = 4096;

/// A kernel, loaded into a device's context.
pub(crate) struct Kernel {
    module: Module,
    function: Function,
}

impl Kernel {
    /// Unloads it from the context that is current.
    pub(crate) fn unload(&self, driver: &Driver) {
        // SAFETY: the module was loaded into this context, and nobody launches from it any longer.
        let status = unsafe { (driver.api.module_unload)(self.module) };
        if status != number::SUCCESS {
            tracing::debug!(status, "cuModuleUnload failed");
        }
    }

    fn load(driver: &Driver) -> Result<Self> {
        let mut module = Module::NULL;
        // SAFETY: writes one module; the text ends with a NUL.
        let status = unsafe { (driver.api.module_load_data)(&raw mut module, PTX.as_ptr().cast()) };
        driver.check("cuModuleLoadData", status)?;
        let mut function = Function::NULL;
        // SAFETY: writes one function of the module.
        let status = unsafe { (driver.api.module_get_function)(&raw mut function, module, ENTRY.as_ptr()) };
        let kernel = Self { module, function };
        if let Err(error) = driver.check("cuModuleGetFunction", status) {
            kernel.unload(driver);
            return Err(error);
        }
        Ok(kernel)
    }
}

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
        let (mut ptr, mut count, mut value) = (range.ptr.get(), range.len / 4, value);
        if count == 0 {
            return Ok(());
        }
        let _current = self.enter(device)?;
        let function = self.add_f32(device)?;
        let blocks = count.div_ceil(u64::from(THREADS_PER_BLOCK)).min(MOST_BLOCKS) as u32;
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut ptr).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        // SAFETY: the arguments are of the types of the kernel's parameters and are copied before the call returns;
        // stream and range are as the caller promised.
        let status = unsafe {
            (self.api.launch_kernel)(
                function,
                blocks,
                1,
                1,
                THREADS_PER_BLOCK,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", status)
    }

    /// The kernel of a device whose context is current.
    fn add_f32(&self, device: DeviceOrdinal) -> Result<Function> {
        let slot = &self.device(device)?.add_f32;
        if let Some(kernel) = slot.get() {
            return Ok(kernel.function);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = slot.get() {
            return Ok(kernel.function);
        }
        let kernel = Kernel::load(self)?;
        Ok(slot.get_or_init(|| kernel).function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ptx_has_the_entry_and_ends_with_its_only_nul() {
        assert!(PTX.contains(&format!(".visible .entry {}(", ENTRY.to_str().unwrap())));
        assert_eq!(PTX.find('\0'), Some(PTX.len() - 1));
        assert!(PTX.is_ascii());
    }
}
