//! Driver calls of the surrounding program, which the backend does not make.

use std::ffi::{c_int, c_uint, c_void};

use libloading::Library;

use device_ipc_core::backend::DeviceIpc;
use device_ipc_cuda::CudaBackend;

/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
pub(crate) const CAPTURE_INVALIDATED: i32 = 901;

/// The library that the backend loaded.
#[derive(Debug)]
pub(crate) struct Raw {
    library: Library,
}

impl Raw {
    pub(crate) fn of(backend: &CudaBackend) -> Self {
        let file = backend.info().library.as_ref().expect("the backend has a library");
        // SAFETY: loaded already.
        Self { library: unsafe { Library::new(file) }.unwrap() }
    }

    /// Returns whether the driver has a function with this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        // SAFETY: the function is not called.
        unsafe { self.library.get::<*const c_void>(name) }.is_ok()
    }

    /// Returns the function with this name.
    ///
    /// # Safety
    ///
    /// `F` is its type.
    unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: as the caller promised.
        *unsafe { self.library.get::<F>(name) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Calls a function that takes and writes 64-bit numbers. Returns its status.
    fn call(&self, name: &str, arguments: [u64; 2]) -> i32 {
        type Function = unsafe extern "C" fn(u64, u64) -> i32;
        // SAFETY: integers and pointers of up to 64 bits are passed in the same way, and the functions take at most
        // two.
        unsafe { self.function::<Function>(name)(arguments[0], arguments[1]) }
    }

    fn get(&self, name: &str) -> u64 {
        let mut value = 0u64;
        assert_eq!(self.call(name, [(&raw mut value).expose_provenance() as u64, 0]), 0, "{name}");
        value
    }

    /// Returns this thread's current context, or 0.
    pub(crate) fn current(&self) -> u64 {
        self.get("cuCtxGetCurrent")
    }

    pub(crate) fn push(&self, context: u64) {
        assert_eq!(self.call("cuCtxPushCurrent_v2", [context, 0]), 0);
    }

    /// Replaces the current context; 0 pops it from the thread's stack.
    pub(crate) fn set_current(&self, context: u64) {
        assert_eq!(self.call("cuCtxSetCurrent", [context, 0]), 0);
    }

    /// Pops the current context from the thread's stack, and returns it.
    pub(crate) fn pop(&self) -> u64 {
        self.get("cuCtxPopCurrent_v2")
    }

    /// Retains the primary context.
    pub(crate) fn retain_primary(&self, device: u32) -> u64 {
        let mut context = 0u64;
        let out = (&raw mut context).expose_provenance() as u64;
        assert_eq!(self.call("cuDevicePrimaryCtxRetain", [out, u64::from(device)]), 0);
        context
    }

    pub(crate) fn reset_primary(&self, device: u32) {
        assert_eq!(self.call("cuDevicePrimaryCtxReset_v2", [u64::from(device), 0]), 0);
    }

    /// Creates a further context on a device, which is not current afterwards.
    pub(crate) fn create_context(&self, device: c_int) -> u64 {
        type Function = unsafe extern "C" fn(*mut u64, c_uint, c_int) -> i32;
        let mut context = 0;
        // SAFETY: the function's type; writes one context.
        let status = unsafe { self.function::<Function>("cuCtxCreate_v2")(&raw mut context, 0, device) };
        assert_eq!(status, 0, "cuCtxCreate");
        assert_eq!(self.pop(), context);
        context
    }

    /// Creates a stream in the current context, with `CU_STREAM_NON_BLOCKING` or 0.
    pub(crate) fn create_stream(&self, flags: u64) -> u64 {
        let mut stream = 0u64;
        let out = (&raw mut stream).expose_provenance() as u64;
        assert_eq!(self.call("cuStreamCreate", [out, flags]), 0);
        stream
    }

    /// Begins a capture in a mode: 0 global, 1 thread-local, 2 relaxed.
    pub(crate) fn begin_capture(&self, stream: u64, mode: u64) {
        assert_eq!(self.call("cuStreamBeginCapture_v2", [stream, mode]), 0);
    }

    /// Ends the capture. Returns the number of nodes, or the status.
    pub(crate) fn end_capture(&self, stream: u64) -> Result<usize, i32> {
        let mut graph = 0u64;
        let status = self.call("cuStreamEndCapture", [stream, (&raw mut graph).expose_provenance() as u64]);
        if status != 0 {
            return Err(status);
        }
        type Function = unsafe extern "C" fn(u64, *mut c_void, *mut usize) -> i32;
        let mut nodes = 0;
        // SAFETY: the function's type; null requests only the number.
        let status = unsafe {
            self.function::<Function>("cuGraphGetNodes")(graph, std::ptr::null_mut(), &raw mut nodes)
        };
        assert_eq!(status, 0, "cuGraphGetNodes");
        assert_eq!(self.call("cuGraphDestroy", [graph, 0]), 0);
        Ok(nodes)
    }
}
