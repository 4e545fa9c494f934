//! The default context of a device, current on the thread for the duration of a call.
//!
//! Most of ACL works on the calling thread's context, and the caller may have one of its own, or none: without one,
//! calls return 107002 ("Device Management", `aclrtSetDevice`; "Context Management"). `aclrtSetDevice` is counted, so
//! it is called once per device, and reverted when the backend is dropped; after that a thread gets the default context
//! by `aclrtSetCurrentContext`, which counts nothing.
//!
//! A thread without a context keeps the default one of the device that it last worked on: ACL cannot unset a context
//! (`aclrtSetCurrentContext` of a null pointer is an invalid parameter).

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::PoisonError;

use device_ipc_core::{DeviceOrdinal, Result};

use super::device::Device;
use super::driver::Driver;
use crate::bindings::*;
use crate::library::call;

/// A guard: the context is current on this thread until the guard is dropped.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    /// The context to restore, if it is another one.
    previous: Option<aclrtContext>,
    _this_thread: PhantomData<*const ()>,
}

impl Driver {
    /// Makes the default context of `device` current; the first call creates it.
    pub(crate) fn enter(&self, device: DeviceOrdinal) -> Result<Current<'_>> {
        let context = self.default_context(device)?;
        let current = self.current_context();
        if current != Some(context) {
            // SAFETY: the context lives until the driver is dropped; a context that was destroyed is an error.
            let status = unsafe { call!(self, aclrtSetCurrentContext(context)) };
            self.check("aclrtSetCurrentContext", status)?;
        }
        let previous = current.filter(|current| *current != context);
        Ok(Current { driver: self, previous, _this_thread: PhantomData })
    }

    /// Runs `body` with the default context of `device` current, and then restores the caller's context, also if `body`
    /// has left another one.
    pub(crate) fn run_in_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        let _caller = CallerContext { driver: self, context: self.current_context() };
        let current = self.enter(device);
        if let Err(error) = &current {
            // Calls of the backend report the error themselves; an owner is dropped regardless.
            tracing::debug!(target: crate::LOG, %error, %device, "cannot enter the default context");
        }
        body();
    }

    fn default_context(&self, ordinal: DeviceOrdinal) -> Result<aclrtContext> {
        let device = self.device(ordinal)?;
        if let Some(context) = device.context.get() {
            return Ok(aclrtContext(*context as *mut c_void));
        }
        let _creating = self.creating.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = device.context.get() {
            return Ok(aclrtContext(*context as *mut c_void));
        }
        self.check("aclInit", self.initialise())?;
        let previous = self.current_context();
        // SAFETY: the ordinal is below the count. Makes the default context current for this thread.
        let status = unsafe { call!(self, aclrtSetDevice(device.number())) };
        self.check("aclrtSetDevice", status)?;
        let context = self.current_context();
        self.restore(previous);
        let Some(context) = context else {
            // SAFETY: reverts the call above.
            unsafe { call!(self, aclrtResetDevice(device.number())) };
            return Err(self.error("aclrtGetCurrentContext", ACL_ERROR_RT_CONTEXT_NULL, ""));
        };
        tracing::debug!(target: crate::LOG, device = %ordinal, "created the default ACL context");
        Ok(aclrtContext(*device.context.get_or_init(|| context.0 as usize) as *mut c_void))
    }

    fn current_context(&self) -> Option<aclrtContext> {
        let mut context = aclrtContext(std::ptr::null_mut());
        // SAFETY: writes one context; without one it is an error.
        let status = unsafe { call!(self, aclrtGetCurrentContext(&raw mut context)) };
        (status == ACL_SUCCESS && !context.0.is_null()).then_some(context)
    }

    fn restore(&self, previous: Option<aclrtContext>) {
        let Some(context) = previous else { return };
        // SAFETY: the context was current on this thread; a context that was destroyed since is an error.
        let status = unsafe { call!(self, aclrtSetCurrentContext(context)) };
        if status != ACL_SUCCESS {
            tracing::warn!(target: crate::LOG, status, "aclrtSetCurrentContext failed: cannot restore the caller's context");
        }
    }

    /// Frees the objects of a device and releases the device.
    fn release(&self, device: &Device) {
        if device.context.get().is_none() {
            return;
        }
        if let Ok(_current) = self.enter(device.info.ordinal) {
            device.staging.release(self);
            device.sweep_retired(self);
        }
        // SAFETY: reverts the one `aclrtSetDevice` of `enter`. Every object that uses the context shares the driver,
        // which is being dropped.
        let status = unsafe { call!(self, aclrtResetDevice(device.number())) };
        if status != ACL_SUCCESS {
            tracing::warn!(target: crate::LOG, status, device = %device.info.ordinal, "aclrtResetDevice failed");
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for device in &self.devices {
            self.release(device);
        }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        self.driver.restore(self.previous);
    }
}

/// A guard: dropping it makes the context current that was current when the guard was created. A thread that had none
/// keeps its current one.
struct CallerContext<'a> {
    driver: &'a Driver,
    context: Option<aclrtContext>,
}

impl Drop for CallerContext<'_> {
    fn drop(&mut self) {
        if self.context.is_some() && self.driver.current_context() != self.context {
            self.driver.restore(self.context);
        }
    }
}
