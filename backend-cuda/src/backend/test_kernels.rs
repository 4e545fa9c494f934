//! Test kernels: an addition, which needs no compiler on the machine ([`kernel`](crate::objects::kernel)), and a delay.

use std::ffi::c_void;
use std::thread;
use std::time::Duration;

use device_ipc_core::backend::TestKernels;
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DeviceRange, Result};

use super::cuda::CudaBackend;
use crate::bindings::api::HostFn;

impl TestKernels for CudaBackend {
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()> {
        let (raw, _current) = self.driver().enter_with(stream)?;
        // SAFETY: as the caller promised.
        unsafe { self.driver().launch_add_f32(range, value, stream.device(), raw) }
    }

    fn load(&self, device: DeviceOrdinal) -> Result<()> {
        self.driver().load_add_f32(device)
    }

    /// The driver may run the delays of several streams one after the other: they share its thread for host functions
    /// (`cuLaunchHostFunc`).
    fn delay(&self, time: Duration, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "a delay")?;
        // The time itself is the argument: nothing to free, whether the function is ever called or not.
        let nanoseconds = usize::try_from(time.as_nanos()).unwrap_or(usize::MAX);
        let function: HostFn = sleep_for;
        // SAFETY: the function calls nothing of CUDA, and takes its argument as a number.
        let status = unsafe {
            (driver.api.launch_host_func)(raw, function, std::ptr::without_provenance_mut(nanoseconds))
        };
        driver.check("cuLaunchHostFunc", status)
    }

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

extern "C" fn sleep_for(nanoseconds: *mut c_void) {
    thread::sleep(Duration::from_nanos(nanoseconds.addr() as u64));
}
