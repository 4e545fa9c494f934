//! The primary context of a device, current for the time of a call.
//!
//! Most of libcuda works on the calling thread's current context, and the caller may have one of its own, or none. A
//! push and a pop around each call leave the thread's stack of contexts as it was ("Context Management",
//! `group__CUDA__CTX`; "Primary Context Management", `group__CUDA__PRIMARY__CTX`).

use std::marker::PhantomData;
use std::sync::PoisonError;

use device_ipc_core::{DeviceOrdinal, Result};

use crate::api::Context;
use crate::driver::Driver;
use crate::status::number;

/// The context is current until this is dropped, on this thread.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    _this_thread: PhantomData<*const ()>,
}

impl Driver {
    /// Makes the primary context of `device` current, and retains it before if nobody has yet.
    pub(crate) fn enter(&self, device: DeviceOrdinal) -> Result<Current<'_>> {
        let context = self.primary_context(device)?;
        // SAFETY: the context is retained until the driver is dropped.
        self.check("cuCtxPushCurrent", unsafe { (self.api.ctx_push_current)(context) })?;
        Ok(Current { driver: self, _this_thread: PhantomData })
    }

    fn primary_context(&self, ordinal: DeviceOrdinal) -> Result<Context> {
        let device = self.device(ordinal)?;
        if let Some(context) = device.context.get() {
            return Ok(*context);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = device.context.get() {
            return Ok(*context);
        }
        let mut context = Context::NULL;
        // SAFETY: writes one context; `handle` is of `cuDeviceGet`.
        let status = unsafe { (self.api.device_primary_ctx_retain)(&raw mut context, device.handle) };
        self.check("cuDevicePrimaryCtxRetain", status)?;
        tracing::debug!(device = %ordinal, "retained the primary CUDA context");
        Ok(*device.context.get_or_init(|| context))
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = Context::NULL;
        // SAFETY: writes one context; `enter` pushed one on this thread, which the type does not let go of.
        let status = unsafe { (self.driver.api.ctx_pop_current)(&raw mut popped) };
        if status != number::SUCCESS {
            tracing::warn!(status, "cuCtxPopCurrent failed");
        }
    }
}
