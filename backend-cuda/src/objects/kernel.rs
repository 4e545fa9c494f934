//! The addition kernel of the conformance suite and the examples, which needs no compiler on the machine.
//!
//! The driver compiles the PTX text when a device first needs it ("Module Management", `group__CUDA__MODULE`;
//! "Execution Control", `group__CUDA__EXEC`; the PTX ISA manual).

use std::ffi::{CStr, c_void};

use device_ipc_core::Result;

use crate::bindings::api::{Function, Module, Stream};
use crate::library::CudaLibrary;
use crate::library::status::number;

const PTX: &str = concat!(include_str!("add_f32.ptx"), "\0");
const ENTRY: &CStr = c"device_ipc_add_f32";
const THREADS_PER_BLOCK: u32 = 256;
/// Enough blocks to fill any device; the kernel loops over the rest.
const MAX_BLOCKS: u64 = 4096;

/// A kernel in a device's context.
pub(crate) struct Kernel {
    module: Module,
    function: Function,
}

impl Kernel {
    /// Loads the kernel into the current context.
    pub(super) fn load(library: &CudaLibrary) -> Result<Self> {
        let mut module = Module::NULL;
        // SAFETY: writes one module; the text ends with a NUL.
        let status = unsafe { (library.api.module_load_data)(&raw mut module, PTX.as_ptr().cast()) };
        library.check("cuModuleLoadData", status)?;
        let mut function = Function::NULL;
        // SAFETY: writes one function of the module.
        let status = unsafe { (library.api.module_get_function)(&raw mut function, module, ENTRY.as_ptr()) };
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

    /// Adds `value` to `count` floats at `ptr`.
    ///
    /// # Safety
    ///
    /// The kernel is of the current context, as is the stream. Its device can access the floats, which stay mapped
    /// until the kernel has finished.
    pub(super) unsafe fn launch(
        &self,
        library: &CudaLibrary,
        mut ptr: u64,
        mut count: u64,
        mut value: f32,
        stream: Stream,
    ) -> Result<()> {
        let blocks = count.div_ceil(u64::from(THREADS_PER_BLOCK)).min(MAX_BLOCKS) as u32;
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut ptr).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        // SAFETY: the arguments have the types of the kernel's parameters and are copied before the call returns;
        // stream and floats are as the caller promised.
        let status = unsafe {
            (library.api.launch_kernel)(
                self.function,
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
        library.check("cuLaunchKernel", status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_has_the_entry_and_one_final_nul() {
        assert!(PTX.contains(&format!(".visible .entry {}(", ENTRY.to_str().unwrap())));
        assert_eq!(PTX.find('\0'), Some(PTX.len() - 1));
        assert!(PTX.is_ascii());
    }
}
