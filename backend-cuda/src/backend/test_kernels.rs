//! Test kernels: an addition, which needs no compiler on the machine ([`kernel`](crate::objects::kernel)), and host functions.

use std::ffi::c_void;

use device_ipc_core::backend::TestKernels;
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DeviceRange, Result};

use super::cuda::CudaBackend;

impl TestKernels for CudaBackend {
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()> {
        let (raw, _current) = self.driver().enter_with(stream)?;
        // SAFETY: as the caller promised.
        unsafe { self.driver().launch_add_f32(range, value, stream.device(), raw) }
    }

    fn load(&self, device: DeviceOrdinal) -> Result<()> {
        self.driver().load_add_f32(device)
    }

    /// The driver may run the functions of several streams one after the other: they share its thread (`cuLaunchHostFunc`).
    fn host_function(&self, function: Box<dyn FnOnce() + Send>, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "a host function")?;
        let function = Box::into_raw(Box::new(function));
        // SAFETY: the function takes the box back when it is called; a stream that fails before leaves it.
        let status = unsafe { (driver.api.launch_host_func)(raw, run_function, function.cast()) };
        driver.check("cuLaunchHostFunc", status).inspect_err(|_| {
            // SAFETY: the call has failed, so the driver does not hold the box.
            drop(unsafe { Box::from_raw(function) });
        })
    }
}

extern "C" fn run_function(function: *mut c_void) {
    // SAFETY: made by `Box::into_raw` above for this one call.
    let function = unsafe { Box::from_raw(function.cast::<Box<dyn FnOnce() + Send>>()) };
    function();
}
