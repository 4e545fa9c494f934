//! Kernels of this crate, which need no compiler on the machine.
//!
//! The driver compiles the PTX text when a device first needs it ("Module Management", `group__CUDA__MODULE`;
//! "Execution Control", `group__CUDA__EXEC`; the PTX ISA manual).

use std::ffi::{CStr, c_void};
use std::sync::{OnceLock, PoisonError};

use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::api::{Function, Module, Stream};
use crate::library::CudaLibrary;
use crate::library::status::number;
use crate::objects::device::Device;
use crate::objects::driver::Driver;

pub(super) const THREADS_PER_BLOCK: u32 = 256;

/// The text of a kernel.
pub(super) struct Source {
    pub(super) ptx: &'static CStr,
    pub(super) entry: &'static CStr,
}

/// A kernel in a device's context.
pub(crate) struct Kernel {
    module: Module,
    function: Function,
}

impl Kernel {
    /// Loads a kernel into the current context.
    pub(super) fn load(library: &CudaLibrary, source: &Source) -> Result<Self> {
        let mut module = Module::NULL;
        // SAFETY: writes one module; the text ends with a NUL.
        let status = unsafe { (library.api.module_load_data)(&raw mut module, source.ptx.as_ptr().cast()) };
        library.check("cuModuleLoadData", status)?;
        let mut function = Function::NULL;
        // SAFETY: writes one function of the module.
        let status =
            unsafe { (library.api.module_get_function)(&raw mut function, module, source.entry.as_ptr()) };
        let kernel = Self { module, function };
        if let Err(error) = library.check("cuModuleGetFunction", status) {
            kernel.unload(library);
            return Err(error);
        }
        Ok(kernel)
    }

    /// Unloads the kernel from the current context.
    pub(super) fn unload(&self, library: &CudaLibrary) {
        // SAFETY: the module was loaded into this context, and no thread launches from it any longer.
        let status = unsafe { (library.api.module_unload)(self.module) };
        if status != number::SUCCESS {
            tracing::debug!(target: crate::LOG, status, "cuModuleUnload failed");
        }
    }

    /// Launches the kernel with [`THREADS_PER_BLOCK`].
    ///
    /// # Safety
    ///
    /// The kernel is of the current context, as is the stream. The arguments point to values of the types of the kernel's
    /// parameters. What the kernel accesses, its device can access, and it stays mapped until the kernel has finished.
    pub(super) unsafe fn launch<const N: usize>(
        &self,
        library: &CudaLibrary,
        blocks: [u32; 3],
        mut arguments: [*mut c_void; N],
        stream: Stream,
    ) -> Result<()> {
        let [x, y, z] = blocks;
        // SAFETY: the arguments are copied before the call returns; everything else is as the caller promised.
        let status = unsafe {
            (library.api.launch_kernel)(
                self.function,
                x,
                y,
                z,
                THREADS_PER_BLOCK,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        library.check("cuLaunchKernel", status)
    }
}

impl Driver {
    /// Returns a kernel of a device whose context is current. Loads it at the first call.
    pub(super) fn kernel<'d>(
        &'d self,
        device: DeviceOrdinal,
        source: &Source,
        slot: impl FnOnce(&'d Device) -> &'d OnceLock<Kernel>,
    ) -> Result<&'d Kernel> {
        let slot = slot(self.device(device)?);
        if let Some(kernel) = slot.get() {
            return Ok(kernel);
        }
        let _creating = self.creating.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = slot.get() {
            return Ok(kernel);
        }
        let kernel = Kernel::load(self, source)?;
        Ok(slot.get_or_init(|| kernel))
    }
}

/// Returns the PTX text of a file with a NUL at its end.
pub(super) const fn ptx(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("one NUL, at the end"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{add_f32, copy_blocks};
    use super::*;

    #[test]
    fn ptx_has_the_entry() {
        for Source { ptx, entry } in [&add_f32::SOURCE, &copy_blocks::SOURCE, &copy_blocks::LARGE_SOURCE] {
            let text = ptx.to_str().unwrap();
            assert!(text.contains(&format!(".visible .entry {}(", entry.to_str().unwrap())));
            assert!(text.is_ascii());
        }
    }
}
