//! Streams of the caller's framework, or of the library.

use std::sync::Arc;

use device_ipc::{AsStream, BorrowedStream, DeviceOrdinal, Ipc};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::{OrRaise as _, PlacementError};
use crate::exchange::Exchange;
use crate::owner::PyOwner;
use crate::session::{DeviceArg, ipc, not_picklable};
use crate::tensor::device_name;
use crate::{backend, dlpack, wait};

/// A stream of the library, for programs without a framework that has streams.
///
/// `device` is a name such as `"cuda:1"` or an ordinal; by default device 0 of the default backend. Raises `BackendError` if no
/// backend has devices, `PlacementError` if there is no such device, and `ValueError` for a text that names none.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Stream {
    stream: Arc<device_ipc::Stream>,
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (device=None))]
    fn new(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let device = device.map(DeviceArg::parse).transpose()?;
        let ipc = ipc(py, device.and_then(|device| device.backend))?;
        let ordinal = device.map_or(0.into(), |device| device.ordinal);
        Ok(Self { stream: Arc::new(py.detach(|| ipc.create_stream(ordinal)).or_raise(py)?) })
    }

    /// The vendor's handle, as a number.
    #[getter]
    fn handle(&self) -> u64 {
        self.stream.as_stream().raw()
    }

    /// The device: `"cuda:0"`, `"npu:0"` or `"mock:0"`.
    #[getter]
    fn device(&self) -> String {
        device_name(self.stream.as_stream().backend(), self.stream.device().get())
    }

    /// Waits until all submitted work has finished.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let stream = Arc::clone(&self.stream);
        wait::aside(py, move || stream.synchronize())?.or_raise(py)
    }

    /// Returns the version of the protocol, 0, and the handle.
    fn __cuda_stream__(&self) -> (u32, u64) {
        (0, self.handle())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Stream", "create one in the other process"))
    }

    fn __repr__(&self) -> String {
        format!("<device_ipc.Stream on {}>", self.device())
    }
}

/// A stream that a caller passed, with the object that keeps it.
pub(crate) struct StreamArg {
    backend: &'static str,
    device: DeviceOrdinal,
    raw: u64,
    ipc: Ipc,
    /// The stream is not destroyed before this is dropped.
    _owner: Option<PyOwner>,
}

impl StreamArg {
    /// Reads a stream: an object of the library, an object with `__cuda_stream__`, with an attribute of the kind of device such as
    /// `cuda_stream` (PyTorch), with `ptr` (CuPy) or `handle` (numba), or a number.
    pub(crate) fn parse(stream: &Bound<'_, PyAny>, ipc: &Ipc, device: DeviceOrdinal) -> PyResult<Self> {
        let backend = ipc.backend().info().name;
        let made = |device, raw| {
            let owner = PyOwner::new(stream.clone().unbind());
            Self { backend, device, raw, ipc: ipc.clone(), _owner: Some(owner) }
        };
        if let Ok(own) = stream.cast::<Stream>() {
            let own = own.get().stream.as_stream();
            let mut parsed = made(own.device(), own.raw());
            parsed.backend = own.backend();
            return Ok(parsed);
        }
        let of_framework = || stream.getattr("device").ok()?.getattr("index").ok()?.extract::<u32>().ok();
        let device = of_framework().map_or(device, DeviceOrdinal::new);
        if let Ok(raw) = stream.extract::<u64>() {
            return Ok(made(device, raw));
        }
        let names = backend::kinds().map(|kind| format!("{kind}_stream"));
        for name in names.chain(["ptr".to_owned()]) {
            if let Ok(raw) = stream.getattr(&*name).and_then(|raw| raw.extract::<u64>()) {
                return Ok(made(device, raw));
            }
        }
        if let Ok(protocol) = stream.getattr("__cuda_stream__") {
            // A method, or a property in early versions of the protocol.
            let pair = if protocol.is_callable() { protocol.call0()? } else { protocol };
            let (_, raw): (u32, u64) = pair.extract()?;
            return Ok(made(device, raw));
        }
        // A stream of numba: a `c_void_p`, whose value is `None` for the default stream, or a number.
        if let Ok(handle) = stream.getattr("handle") {
            let raw = handle.getattr("value").unwrap_or(handle);
            if let Ok(raw) = raw.extract::<Option<u64>>() {
                return Ok(made(device, raw.unwrap_or(0)));
            }
        }
        let found = stream.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        Err(PyTypeError::new_err(format!(
            "{found} is not a stream: expected device_ipc.Stream, an object with __cuda_stream__, or a handle as a number"
        )))
    }

    /// Returns the stream that the framework in use submits to, or `None` where there is none.
    ///
    /// Frameworks that are not imported are not looked for.
    pub(crate) fn current(py: Python<'_>, ipc: &Ipc, device: DeviceOrdinal) -> PyResult<Option<Self>> {
        let backend = ipc.backend().info().name;
        if backend::is_host(backend) {
            return Ok(None);
        }
        let found = py
            .import("device_ipc._streams")?
            .call_method1("current", (backend::kind(backend), device.get()))?;
        if found.is_none() {
            return Ok(None);
        }
        Ok(Some(Self::of_framework(ipc, device, found.extract::<u64>()?)))
    }

    /// A stream that a framework names as its current one.
    pub(crate) fn of_framework(ipc: &Ipc, device: DeviceOrdinal, raw: u64) -> Self {
        Self { backend: ipc.backend().info().name, device, raw, ipc: ipc.clone(), _owner: None }
    }

    /// Returns the stream that PyTorch submits its work to, on a device that it uses.
    pub(crate) fn of_torch(py: Python<'_>, ipc: &Ipc, device: DeviceOrdinal) -> PyResult<Option<Self>> {
        if backend::dlpack_type(ipc.backend().info().name) == Some(dlpack::KDL_CUDA)
            && let Some(exchange) = Exchange::of_torch(py)
            && let Some(stream) = exchange.current_stream(py, device)?
        {
            return Ok(Some(Self::of_framework(ipc, device, stream)));
        }
        Self::current(py, ipc, device)
    }

    /// Returns the stream that the caller passed, or that of the framework in use.
    pub(crate) fn given_or_current(
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        ipc: &Ipc,
        device: DeviceOrdinal,
    ) -> PyResult<Option<Self>> {
        match stream {
            Some(stream) => Self::parse(stream, ipc, device).map(Some),
            None => Self::current(py, ipc, device),
        }
    }

    /// Fails if the stream is one of another device than the memory.
    pub(crate) fn check_device(&self, device: DeviceOrdinal) -> PyResult<()> {
        if self.device == device {
            return Ok(());
        }
        Err(self
            .of_another_device(&format!("on {}", device_name(self.ipc.backend().info().name, device.get()))))
    }

    pub(crate) const fn device(&self) -> DeviceOrdinal {
        self.device
    }

    /// Returns the error for a stream of another device than those of the memory.
    pub(crate) fn of_another_device(&self, place: &str) -> PyErr {
        PlacementError::new_err(format!(
            "the stream is of {}, and the memory is to be opened {place}; pass a stream of that device, or either of stream and device",
            device_name(self.backend, self.device.get()),
        ))
    }

    /// Waits until all work submitted to the stream has finished.
    pub(crate) fn synchronize(self: &Arc<Self>, py: Python<'_>) -> PyResult<()> {
        let stream = Arc::clone(self);
        wait::aside(py, move || stream.ipc.backend().memory().synchronize(stream.as_stream()))?.or_raise(py)
    }
}

impl AsStream for StreamArg {
    fn as_stream(&self) -> BorrowedStream<'_> {
        // SAFETY: the caller passed a stream of this device, and `_owner` keeps it; the stream that a framework names as its
        // current one is not destroyed during the call.
        unsafe { BorrowedStream::from_raw(self.backend, self.device, self.raw) }
    }
}

/// The argument `stream` of `__dlpack__`.
#[derive(Clone, Copy)]
pub(crate) struct DlpackStream(Option<u64>);

impl DlpackStream {
    /// Reads the argument: no synchronisation for -1, the legacy default stream for `None`, otherwise a handle.
    pub(crate) fn new(stream: Option<i64>) -> Self {
        match stream {
            Some(-1) => Self(None),
            Some(handle) => Self(Some(handle as u64)),
            // CU_STREAM_LEGACY.
            None => Self(Some(1)),
        }
    }

    /// Returns the stream, unless the consumer asked for none.
    pub(crate) fn borrowed(
        self,
        backend: &'static str,
        device: DeviceOrdinal,
    ) -> Option<BorrowedStream<'static>> {
        let raw = self.0?;
        // 1 is a stream of CUDA only. The default one of other devices, whose frameworks may pass none, is the null stream.
        let raw = if raw == 1 && backend::dlpack_type(backend) != Some(dlpack::KDL_CUDA) { 0 } else { raw };
        // SAFETY: by the protocol of DLPack the number is a stream of the tensor's device, alive during the call.
        Some(unsafe { BorrowedStream::from_raw(backend, device, raw) })
    }
}
