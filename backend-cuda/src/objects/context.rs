//! The primary context of a device, current on the thread for the duration of a call.
//!
//! Most of libcuda works on the calling thread's current context, and the caller may have one of its own, or none. A
//! push and a pop around each call leave the thread's stack of contexts as it was ("Context Management",
//! `group__CUDA__CTX`; "Primary Context Management", `group__CUDA__PRIMARY__CTX`).
//!
//! # Resets
//!
//! `cudaDeviceReset` destroys everything in a primary context, however often the context is retained, and the next
//! retain returns an empty context with the same handle. The driver crashes if it then receives a stream or an opened
//! event from before the reset (observed with driver 580.159.04). So each call first queries the context's id, which
//! differs between the two, and this backend refuses a device that was reset: its memory, mappings and events there no
//! longer exist. A new backend can use the device again.

use std::cell::Cell;
use std::ffi::{c_int, c_ulonglong};
use std::marker::PhantomData;
use std::sync::{OnceLock, PoisonError};

use device_ipc_core::{BorrowedStream, DeviceOrdinal, Error, Result};

use crate::bindings::api::{Context, Stream};
use crate::library::NAME;
use crate::library::status::number;
use crate::objects::capture::RelaxedCapture;
use crate::objects::device::{Device, PrimaryContext};
use crate::objects::driver::Driver;
use crate::remedy;

thread_local! {
    /// The innermost context that a [`Current`] on this thread has pushed and not popped yet.
    static INNERMOST: Cell<Option<Entry>> = const { Cell::new(None) };
}

/// The address of a driver, and a context.
type EntryKey = (usize, Context);

/// A context that a thread has entered.
#[derive(Clone, Copy)]
struct Entry {
    key: EntryKey,
    /// Whether foreign code runs inside, which may make another context current.
    runs_foreign_code: bool,
}

/// A guard: the context is current on this thread until the guard is dropped, and the thread is in the relaxed capture
/// mode meanwhile.
///
/// A guard nested in another one for the same context does nothing of its own.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    context: Context,
    /// `None` for a nested guard.
    pushed: Option<Pushed<'a>>,
    _this_thread: PhantomData<*const ()>,
}

/// State to restore when a context is popped.
struct Pushed<'a> {
    outer: Option<Entry>,
    _relaxed: RelaxedCapture<'a>,
}

/// A guard: dropping it makes the context current that was current when the guard was created.
pub(crate) struct CallerContext<'a> {
    driver: &'a Driver,
    /// `None` if the driver does not return it.
    context: Option<Context>,
    _this_thread: PhantomData<*const ()>,
}

impl Driver {
    /// Makes the primary context of `device` current; the first call retains it.
    pub(crate) fn enter(&self, device: DeviceOrdinal) -> Result<Current<'_>> {
        let retained = self.device(device)?.context.get();
        let key = retained.map(|retained| (self.address(), retained.context));
        if let (Some((_, context)), Some(innermost)) = (key, INNERMOST.get())
            && key == Some(innermost.key)
            && (!innermost.runs_foreign_code || self.current_context() == Some(context))
        {
            return Ok(Current { driver: self, context, pushed: None, _this_thread: PhantomData });
        }
        self.push(device, false)
    }

    /// Makes the primary context of `device` current for foreign code, which may replace it with another one.
    pub(crate) fn enter_for_foreign_code(&self, device: DeviceOrdinal) -> Result<Current<'_>> {
        self.push(device, true)
    }

    /// Returns a guard that restores this thread's current context.
    pub(crate) fn keep_caller_context(&self) -> CallerContext<'_> {
        CallerContext { driver: self, context: self.current_context(), _this_thread: PhantomData }
    }

    /// Returns this thread's current context, which may be null; `None` if the driver does not return it.
    fn current_context(&self) -> Option<Context> {
        let mut context = Context::NULL;
        // SAFETY: writes one context.
        let status = unsafe { (self.api.ctx_get_current)(&raw mut context) };
        (status == number::SUCCESS).then_some(context)
    }

    fn push(&self, device: DeviceOrdinal, runs_foreign_code: bool) -> Result<Current<'_>> {
        let relaxed = self.relax_capture();
        let context = self.primary_context(device)?;
        // SAFETY: the context is retained until the driver is dropped.
        self.check("cuCtxPushCurrent", unsafe { (self.api.ctx_push_current)(context) })?;
        let outer = INNERMOST.replace(Some(Entry { key: (self.address(), context), runs_foreign_code }));
        let pushed = Some(Pushed { outer, _relaxed: relaxed });
        Ok(Current { driver: self, context, pushed, _this_thread: PhantomData })
    }

    /// Returns a number that distinguishes this driver from another backend's, which may have retained the same context
    /// before a reset.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Makes the primary context of a stream's device current, and refuses a stream of another context: the driver
    /// crashes when such a stream waits for an interprocess event (observed with driver 580.159.04), and can neither
    /// record an event nor launch our kernel there.
    pub(crate) fn enter_with(&self, stream: BorrowedStream<'_>) -> Result<(Stream, Current<'_>)> {
        let raw = self.stream(stream)?;
        let current = self.enter(stream.device())?;
        if raw.is_default() {
            // A default stream belongs to the current context, and querying its context breaks the captures of blocking
            // streams (observed with driver 580.159.04).
            self.refresh_capture(raw);
            return Ok((raw, current));
        }
        let mut context = Context::NULL;
        // SAFETY: writes one context; the stream lives, as `BorrowedStream` promises.
        let status = unsafe { (self.api.stream_get_ctx)(raw, &raw mut context) };
        // This is the older form of the function, which does not support streams of green contexts: parts of the
        // primary context.
        if status == number::ERROR_NOT_SUPPORTED || context == current.context {
            self.refresh_capture(raw);
            return Ok((raw, current));
        }
        self.check("cuStreamGetCtx", status)?;
        Err(Error::Unsupported {
            backend: NAME,
            what: format!("use a stream outside the primary context of device {}", stream.device()),
            why: format!(
                "memory is opened and events are recorded in the primary context; {}",
                remedy::PASS_PRIMARY_STREAM
            ),
        })
    }

    fn primary_context(&self, ordinal: DeviceOrdinal) -> Result<Context> {
        let device = self.device(ordinal)?;
        if let Some(retained) = device.context.get() {
            self.refuse_reset(device, *retained)?;
            return Ok(retained.context);
        }
        let _creating = self.creating.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(retained) = device.context.get() {
            return Ok(retained.context);
        }
        let mut context = Context::NULL;
        // SAFETY: writes one context; `handle` is of `cuDeviceGet`.
        let status = unsafe { (self.api.device_primary_ctx_retain)(&raw mut context, device.handle) };
        self.check("cuDevicePrimaryCtxRetain", status)?;
        tracing::debug!(target: crate::LOG, device = %ordinal, "retained the primary CUDA context");
        self.warn_of_mps(ordinal);
        let id = self.context_id(context).ok();
        device.context.get_or_init(|| PrimaryContext { context, id });
        Ok(context)
    }

    /// Refuses a device whose primary context is no longer the retained one.
    fn refuse_reset(&self, device: &Device, retained: PrimaryContext) -> Result<()> {
        let id = match retained.id {
            Some(_) => self.context_id(retained.context).map(Some),
            None => self.check_primary_active(device).map(|()| None),
        };
        match id {
            Ok(id) if id == retained.id => Ok(()),
            Ok(_) | Err(number::ERROR_CONTEXT_IS_DESTROYED) => Err(self.error(
                "cuCtxGetId",
                number::ERROR_CONTEXT_IS_DESTROYED,
                "The device was reset in this process (cudaDeviceReset, cuDevicePrimaryCtxReset): its memory, mappings, \
                 events and streams no longer exist. Restart the process, or drop all of them and create a new backend",
            )),
            Err(status) => Err(self.error("cuCtxGetId", status, "")),
        }
    }

    /// Returns the id of a context, or the status of the failure.
    fn context_id(&self, context: Context) -> Result<u64, i32> {
        let get_id = self.api.ctx_get_id.ok_or(number::ERROR_NOT_SUPPORTED)?;
        let mut id: c_ulonglong = 0;
        // SAFETY: writes one number.
        match unsafe { get_id(context, &raw mut id) } {
            number::SUCCESS => Ok(id),
            status => Err(status),
        }
    }

    /// Checks that the primary context was not reset, as far as an older driver reports it: until the next retain.
    fn check_primary_active(&self, device: &Device) -> Result<(), i32> {
        let (mut flags, mut active): (_, c_int) = (0, 0);
        // SAFETY: writes two ints; `handle` is of `cuDeviceGet`.
        match unsafe {
            (self.api.device_primary_ctx_get_state)(device.handle, &raw mut flags, &raw mut active)
        } {
            number::SUCCESS if active == 0 => Err(number::ERROR_CONTEXT_IS_DESTROYED),
            number::SUCCESS => Ok(()),
            status => Err(status),
        }
    }

    /// Frees the objects of a device and releases its context.
    fn release(&self, device: &Device) {
        if device.context.get().is_none() {
            return;
        }
        if let Ok(_current) = self.enter(device.info.ordinal) {
            device.staging.release(self);
            let kernels = [&device.add_f32, &device.copy_blocks].into_iter().filter_map(OnceLock::get);
            for kernel in kernels.chain(device.large_copy_blocks.get().into_iter().flatten()) {
                kernel.unload(self);
            }
        }
        // SAFETY: the context was retained once, and every object that uses it shares the driver, which is being
        // dropped.
        let status = unsafe { (self.api.device_primary_ctx_release)(device.handle) };
        if !matches!(
            status,
            number::SUCCESS | number::ERROR_DEINITIALIZED | number::ERROR_CONTEXT_IS_DESTROYED
        ) {
            tracing::warn!(target: crate::LOG, status, device = %device.info.ordinal, "cuDevicePrimaryCtxRelease failed");
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
        let Some(pushed) = &self.pushed else { return };
        INNERMOST.set(pushed.outer);
        let mut popped = Context::NULL;
        // SAFETY: writes one context; `push` pushed one on this thread, which the guard cannot leave.
        let status = unsafe { (self.driver.api.ctx_pop_current)(&raw mut popped) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(target: crate::LOG, status, "cuCtxPopCurrent failed");
        }
    }
}

impl Drop for CallerContext<'_> {
    fn drop(&mut self) {
        let Some(context) = self.context else { return };
        if self.driver.current_context().is_none_or(|current| current == context) {
            return;
        }
        // SAFETY: the context was current when the guard was created, or is null for none; a context that was destroyed
        // since is an error.
        let status = unsafe { (self.driver.api.ctx_set_current)(context) };
        if status != number::SUCCESS {
            tracing::warn!(target: crate::LOG, status, "cuCtxSetCurrent failed: cannot restore the caller's context");
        }
    }
}
