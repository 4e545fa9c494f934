//! Test kernels: an addition, and host functions.
//!
//! ACL has no kernels that are there without a compiler, so the addition runs on the host, in its place on the stream: a copy
//! to the host, a host function that adds, a copy back.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::backend::TestKernels;
use device_ipc_core::{BorrowedStream, DeviceRange, Error, Result};

use super::ascend::AscendBackend;
use crate::bindings::*;
use crate::memory::copies::Target;
use crate::objects::driver::Driver;
use crate::objects::staging::MAX_STAGED_BYTES;

impl TestKernels for AscendBackend {
    /// On the host, in its place on the stream; where the runtime has no `aclrtLaunchHostFunc`, the
    /// call waits for the stream instead.
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        if !range.len.is_multiple_of(4) || !range.ptr.get().is_multiple_of(4) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} are not whole, aligned 32-bit floats",
                range.len, range.ptr
            )));
        }
        if range.len == 0 {
            return Ok(());
        }
        let _current = driver.enter(stream.device())?;
        let target = Target::of(range, stream);
        let most = range.len.min(MAX_STAGED_BYTES as u64) as usize;
        // One buffer for all parts: the stream is done with one before it begins the next.
        let staged = driver.stage(target, most, stream)?;
        let mut outcome = Ok(());
        let mut done = 0;
        while outcome.is_ok() && done < range.len {
            let len = (range.len - done).min(most as u64) as usize;
            let part = target.offset(done as usize);
            let sum = Sum { address: staged.host.address() as usize, count: len / 4, value };
            // SAFETY: the range stays mapped until the work has finished, as the caller promised.
            outcome = unsafe { driver.copy_to_host(part, &staged, len, raw) }
                .and_then(|()| driver.then_on_host(raw, sum, Sum::add))
                // SAFETY: as above.
                .and_then(|()| unsafe { driver.copy_from_host(part, &staged, len, raw) });
            done += len as u64;
        }
        let returned = driver.unstage(staged, stream, raw);
        outcome.and(returned)
    }

    /// The runtime has one thread for the functions of a device: what [`add_f32`](TestKernels::add_f32) does on other streams
    /// waits for this one.
    fn host_function(&self, function: Box<dyn FnOnce() + Send>, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        let _current = driver.enter(stream.device())?;
        if driver.acl.aclrtLaunchHostFunc.is_err() {
            return Err(Error::Unsupported {
                backend: stream.backend(),
                what: "run a host function on a stream".into(),
                why: "the runtime has no aclrtLaunchHostFunc".into(),
            });
        }
        driver.then_on_host(raw, Mutex::new(Some(function)), |function| {
            if let Some(function) = function.lock().unwrap_or_else(PoisonError::into_inner).take() {
                function();
            }
        })
    }
}

/// Floats that wait in a staging buffer for what is to be added to them.
struct Sum {
    address: usize,
    count: usize,
    value: f32,
}

impl Sum {
    fn add(&self) {
        // SAFETY: a staging buffer starts at a page boundary, holds `count` floats, and no other thread uses it while the
        // stream is between the two copies around this function.
        let floats = unsafe { std::slice::from_raw_parts_mut(self.address as *mut f32, self.count) };
        for float in floats {
            *float += self.value;
        }
    }
}

impl Driver {
    /// Has `function` run with `argument` on the host when the stream gets there, before it goes on. Where the runtime
    /// cannot, waits for the stream and runs it here. The function calls nothing of ACL's, which forbids it.
    fn then_on_host<T: Send + 'static>(
        &self,
        stream: aclrtStream,
        argument: T,
        function: fn(&T),
    ) -> Result<()> {
        extern "C" fn run<T>(argument: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below for this one call.
            let boxed = unsafe { Box::from_raw(argument.cast::<(T, fn(&T))>()) };
            boxed.1(&boxed.0);
        }
        let Ok(launch) = &self.acl.aclrtLaunchHostFunc else {
            self.synchronize_stream(stream)?;
            function(&argument);
            return Ok(());
        };
        let boxed = Box::into_raw(Box::new((argument, function)));
        // SAFETY: the function takes the box back when it is called; a stream that fails before leaves it.
        let status = unsafe { launch(stream, Some(run::<T>), boxed.cast()) };
        if status != ACL_SUCCESS {
            let error = self.error("aclrtLaunchHostFunc", status, "");
            // SAFETY: the call has failed, so the runtime does not hold the box.
            drop(unsafe { Box::from_raw(boxed) });
            return Err(error);
        }
        Ok(())
    }
}
