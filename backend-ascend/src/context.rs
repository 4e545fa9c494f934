//! The default context of a device, current for the time of a call.
//!
//! Most of ACL works on the calling thread's context, and the caller may have one of its own, or none: without one,
//! calls return 107002 ("Device Management", `aclrtSetDevice`; "Context Management"). `aclrtSetDevice` is counted, so it
//! is called once for a device, and taken back with the backend; after that a thread gets the default context by
//! `aclrtSetCurrentContext`, which counts nothing.
//!
//! A thread that had no context keeps the default one of the device that it last worked on: ACL refuses to
//! set none (`aclrtSetCurrentContext` of a null pointer is an invalid parameter).

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::PoisonError;

use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::*;
use crate::driver::{Driver, call};

/// The context is current until this is dropped, on this thread.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    /// The context to go back to, where it is another one.
    earlier: Option<aclrtContext>,
    _this_thread: PhantomData<*const ()>,
}

impl Driver {
    /// Makes the default context of `device` current, and creates it before if nobody has yet.
    pub(crate) fn enter(&self, device: DeviceOrdinal) -> Result<Current<'_>> {
        let context = self.default_context(device)?;
        let current = self.current_context();
        if current != Some(context) {
            // SAFETY: the context is kept until the driver is dropped; one that was destroyed is an error.
            let status = unsafe { call!(self, aclrtSetCurrentContext(context)) };
            self.check("aclrtSetCurrentContext", status)?;
        }
        let earlier = current.filter(|current| *current != context);
        Ok(Current { driver: self, earlier, _this_thread: PhantomData })
    }

    /// Runs `body` with the default context of `device` current, and then makes the caller's current again, also where
    /// `body` has left another one.
    pub(crate) fn run_in_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        let _caller = CallersContext { driver: self, context: self.current_context() };
        let current = self.enter(device);
        if let Err(error) = &current {
            // Calls of the backend say so themselves; an owner is dropped all the same.
            tracing::debug!(%error, %device, "the default context cannot be entered");
        }
        body();
    }

    fn default_context(&self, ordinal: DeviceOrdinal) -> Result<aclrtContext> {
        let device = self.device(ordinal)?;
        if let Some(context) = device.context.get() {
            return Ok(aclrtContext(*context as *mut c_void));
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = device.context.get() {
            return Ok(aclrtContext(*context as *mut c_void));
        }
        self.check("aclInit", self.initialise())?;
        let earlier = self.current_context();
        // SAFETY: the ordinal is below the count. Makes the default context current for this thread.
        let status = unsafe { call!(self, aclrtSetDevice(device.number())) };
        self.check("aclrtSetDevice", status)?;
        let context = self.current_context();
        self.restore(earlier);
        let Some(context) = context else {
            // SAFETY: takes back the call above.
            unsafe { call!(self, aclrtResetDevice(device.number())) };
            return Err(self.error("aclrtGetCurrentContext", ACL_ERROR_RT_CONTEXT_NULL, ""));
        };
        tracing::debug!(device = %ordinal, "took the default ACL context");
        Ok(aclrtContext(*device.context.get_or_init(|| context.0 as usize) as *mut c_void))
    }

    fn current_context(&self) -> Option<aclrtContext> {
        let mut context = aclrtContext(std::ptr::null_mut());
        // SAFETY: writes one context; without one it is an error.
        let status = unsafe { call!(self, aclrtGetCurrentContext(&raw mut context)) };
        (status == ACL_SUCCESS && !context.0.is_null()).then_some(context)
    }

    fn restore(&self, earlier: Option<aclrtContext>) {
        let Some(context) = earlier else { return };
        // SAFETY: it was current on this thread when the call began; one that was destroyed since is an error.
        let status = unsafe { call!(self, aclrtSetCurrentContext(context)) };
        if status != ACL_SUCCESS {
            tracing::warn!(status, "the caller's ACL context could not be made current again");
        }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        self.driver.restore(self.earlier);
    }
}

/// When this is dropped, the thread has the context current that it had when this was made; one that had none keeps what it
/// has.
struct CallersContext<'a> {
    driver: &'a Driver,
    context: Option<aclrtContext>,
}

impl Drop for CallersContext<'_> {
    fn drop(&mut self) {
        if self.context.is_some() && self.driver.current_context() != self.context {
            self.driver.restore(self.context);
        }
    }
}
