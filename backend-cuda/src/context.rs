//! The primary context of a device, current for the time of a call.
//!
//! Most of libcuda works on the calling thread's current context, and the caller may have one of its own, or none. A
//! push and a pop around each call leave the thread's stack of contexts as it was ("Context Management",
//! `group__CUDA__CTX`; "Primary Context Management", `group__CUDA__PRIMARY__CTX`).
//!
//! # Resets
//!
//! `cudaDeviceReset` takes everything that a primary context holds, however often it is retained, and whoever retains it
//! next gets an empty one by the same handle. The driver crashes where it is then given a stream or an opened event from
//! before (seen with driver 580.159.04). So each call first asks for the context's id, which tells the two apart, and a
//! device that was reset is refused from then on by this backend, whose memory, mappings and events there are gone. A new
//! backend may use the device again.

use std::cell::Cell;
use std::ffi::{c_int, c_ulonglong};
use std::marker::PhantomData;
use std::sync::PoisonError;

use device_ipc_core::{BorrowedStream, DeviceOrdinal, Error, Result};

use crate::NAME;
use crate::api::{Context, Stream};
use crate::capture::Relaxed;
use crate::device::Device;
use crate::driver::Driver;
use crate::status::number;

thread_local! {
    /// The last context that a [`Current`] of this thread has put in place and not taken away yet, and whose that is.
    static INNERMOST: Cell<Option<Entry>> = const { Cell::new(None) };
}

/// A driver's address, and a context.
type Place = (usize, Context);

/// What a thread has entered.
#[derive(Clone, Copy)]
struct Entry {
    place: Place,
    /// Whether code of others runs within, which may make another context current.
    open: bool,
}

/// The context is current until this is dropped, on this thread, which is in the relaxed capture mode meanwhile.
///
/// What lives shorter than another one for the same context leaves all that to that one.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    context: Context,
    /// `None` within another one.
    entered: Option<Entered<'a>>,
    _this_thread: PhantomData<*const ()>,
}

/// What is to be put back.
struct Entered<'a> {
    outer: Option<Entry>,
    _relaxed: Relaxed<'a>,
}

/// When this is dropped, the thread has the context current that it had when this was made.
pub(crate) struct CallersContext<'a> {
    driver: &'a Driver,
    /// `None` where the driver does not say.
    context: Option<Context>,
    _this_thread: PhantomData<*const ()>,
}

/// A primary context that this backend has retained.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retained {
    context: Context,
    /// What tells it from the one that takes its place after a reset; `None` where the driver is too old to say
    /// (before CUDA 12).
    id: Option<u64>,
}

impl Driver {
    /// Makes the primary context of `device` current, and retains it before if nobody has yet.
    pub(crate) fn enter(&self, device: DeviceOrdinal) -> Result<Current<'_>> {
        let retained = self.device(device)?.context.get();
        let within = retained.map(|retained| (self.address(), retained.context));
        if let (Some((_, context)), Some(innermost)) = (within, INNERMOST.get())
            && within == Some(innermost.place)
            && (!innermost.open || self.current_context() == Some(context))
        {
            return Ok(Current { driver: self, context, entered: None, _this_thread: PhantomData });
        }
        self.push(device, false)
    }

    /// Makes the primary context of `device` current for code of others, which may make another one current in its place.
    pub(crate) fn enter_for_others(&self, device: DeviceOrdinal) -> Result<Current<'_>> {
        self.push(device, true)
    }

    /// Has this thread's context current again when the result is dropped.
    pub(crate) fn keep_callers_context(&self) -> CallersContext<'_> {
        CallersContext { driver: self, context: self.current_context(), _this_thread: PhantomData }
    }

    /// The context that is current on this thread, or null; `None` where the driver does not say.
    fn current_context(&self) -> Option<Context> {
        let mut context = Context::NULL;
        // SAFETY: writes one context.
        let status = unsafe { (self.api.ctx_get_current)(&raw mut context) };
        (status == number::SUCCESS).then_some(context)
    }

    fn push(&self, device: DeviceOrdinal, open: bool) -> Result<Current<'_>> {
        let relaxed = self.relax_captures();
        let context = self.primary_context(device)?;
        // SAFETY: the context is retained until the driver is dropped.
        self.check("cuCtxPushCurrent", unsafe { (self.api.ctx_push_current)(context) })?;
        let outer = INNERMOST.replace(Some(Entry { place: (self.address(), context), open }));
        let entered = Some(Entered { outer, _relaxed: relaxed });
        Ok(Current { driver: self, context, entered, _this_thread: PhantomData })
    }

    /// What tells it from another backend's, which may have retained the same context before a reset.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Makes the primary context of a stream's device current, to which the stream has to belong: the driver crashes where
    /// a stream of another context waits for an interprocess event (seen with driver 580.159.04), and cannot record one
    /// there, nor launch our kernel.
    pub(crate) fn enter_with(&self, stream: BorrowedStream<'_>) -> Result<(Stream, Current<'_>)> {
        let raw = self.stream(stream)?;
        let current = self.enter(stream.device())?;
        if raw.is_default() {
            // It is that of the context that is current, and asking for it breaks the captures of blocking streams (seen with
            // driver 580.159.04).
            self.look_at_capture(raw);
            return Ok((raw, current));
        }
        let mut context = Context::NULL;
        // SAFETY: writes one context; the stream lives, as `BorrowedStream` promises.
        let status = unsafe { (self.api.stream_get_ctx)(raw, &raw mut context) };
        // The older form of the function, which this is, knows no streams of green contexts: parts of the primary one.
        if status == number::ERROR_NOT_SUPPORTED || context == current.context {
            self.look_at_capture(raw);
            return Ok((raw, current));
        }
        self.check("cuStreamGetCtx", status)?;
        Err(Error::Unsupported {
            backend: NAME,
            what: format!(
                "use a stream of another context than the primary one of device {}",
                stream.device()
            ),
            why: "memory is opened in the primary context, and events are recorded there; take a stream of \
                  cudaStreamCreate, of cudarc's CudaContext::new, or of cuStreamCreate with the context of \
                  cuDevicePrimaryCtxRetain current"
                .into(),
        })
    }

    fn primary_context(&self, ordinal: DeviceOrdinal) -> Result<Context> {
        let device = self.device(ordinal)?;
        if let Some(retained) = device.context.get() {
            self.refuse_reset(device, *retained)?;
            return Ok(retained.context);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(retained) = device.context.get() {
            return Ok(retained.context);
        }
        let mut context = Context::NULL;
        // SAFETY: writes one context; `handle` is of `cuDeviceGet`.
        let status = unsafe { (self.api.device_primary_ctx_retain)(&raw mut context, device.handle) };
        self.check("cuDevicePrimaryCtxRetain", status)?;
        tracing::debug!(device = %ordinal, "retained the primary CUDA context");
        let id = self.context_id(context).ok();
        device.context.get_or_init(|| Retained { context, id });
        Ok(context)
    }

    /// Refuses a device whose primary context is not the one that was retained.
    fn refuse_reset(&self, device: &Device, retained: Retained) -> Result<()> {
        let now = match retained.id {
            Some(_) => self.context_id(retained.context).map(Some),
            None => self.primary_is_active(device).map(|()| None),
        };
        match now {
            Ok(id) if id == retained.id => Ok(()),
            Ok(_) | Err(number::ERROR_CONTEXT_IS_DESTROYED) => Err(self.error(
                "cuCtxGetId",
                number::ERROR_CONTEXT_IS_DESTROYED,
                "The device was reset in this process (cudaDeviceReset, cuDevicePrimaryCtxReset): the memory, mappings, \
                 events and streams that were on it are gone. Start the process again, or let go of all of them and \
                 make a new backend",
            )),
            Err(status) => Err(self.error("cuCtxGetId", status, "")),
        }
    }

    /// The id of a context, or the status that says why there is none.
    fn context_id(&self, context: Context) -> Result<u64, i32> {
        let get_id = self.api.ctx_get_id.ok_or(number::ERROR_NOT_SUPPORTED)?;
        let mut id: c_ulonglong = 0;
        // SAFETY: writes one number.
        match unsafe { get_id(context, &raw mut id) } {
            number::SUCCESS => Ok(id),
            status => Err(status),
        }
    }

    /// All that an older driver tells: nobody has retained the context since it was reset.
    fn primary_is_active(&self, device: &Device) -> Result<(), i32> {
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
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let Some(entered) = &self.entered else { return };
        INNERMOST.set(entered.outer);
        let mut popped = Context::NULL;
        // SAFETY: writes one context; `enter` pushed one on this thread, which the type does not let go of.
        let status = unsafe { (self.driver.api.ctx_pop_current)(&raw mut popped) };
        if status != number::SUCCESS {
            tracing::warn!(status, "cuCtxPopCurrent failed");
        }
    }
}

impl Drop for CallersContext<'_> {
    fn drop(&mut self) {
        let Some(context) = self.context else { return };
        if self.driver.current_context().is_none_or(|current| current == context) {
            return;
        }
        // SAFETY: it was current when this was made, or is null, for none; one that was destroyed since is an error.
        let status = unsafe { (self.driver.api.ctx_set_current)(context) };
        if status != number::SUCCESS {
            tracing::warn!(status, "cuCtxSetCurrent failed; the caller's context is not current any longer");
        }
    }
}
