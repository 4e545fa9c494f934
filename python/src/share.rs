//! Sharing tensors of any framework.

use std::sync::{Arc, OnceLock};

use device_ipc::{
    DeviceOrdinal, DevicePtr, DeviceRange, Error, ExposurePolicy, Ipc, OwnedRegion, Region, ShareBuilder,
    TensorLayout,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::dlpack::Foreign;
use crate::error::{OrRaise as _, PlacementError, exception};
use crate::exchange::Exchange;
use crate::export::Export;
use crate::mapping::Mapping;
use crate::memory::dtype;
use crate::named_tensors::NamedTensors;
use crate::owner::PyOwner;
use crate::session::{access, host_backend, ipc_for_users, ipc_in_use};
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor};
use crate::{backend, cuda_array_interface, dlpack};

/// The value that keeps shared memory allocated.
pub(crate) enum Owner {
    Object(#[expect(dead_code, reason = "it is only dropped")] PyOwner),
    /// The objects of all tensors that are shared together, so that their drop takes the interpreter lock once.
    Objects(#[expect(dead_code, reason = "they are only dropped")] Arc<OnceLock<PyOwner<Vec<Py<PyAny>>>>>),
    Native(#[expect(dead_code, reason = "it is only dropped")] Keeper),
}

/// A tensor that is to be shared.
pub(crate) struct Source {
    pub(crate) backend: &'static str,
    pub(crate) device: DeviceOrdinal,
    pub(crate) region: DeviceRange,
    pub(crate) layout: TensorLayout,
    /// Whether the framework permits writing.
    pub(crate) is_writable: bool,
    pub(crate) owner: SourceOwner,
}

/// The value that keeps the memory of one tensor allocated.
pub(crate) enum SourceOwner {
    Object(Py<PyAny>),
    Native(Keeper),
}

impl Source {
    /// Reads a tensor: one of this package, of PyTorch, or with `__cuda_array_interface__` or `__dlpack__`; `None` for anything
    /// else.
    pub(crate) fn read(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if let Some(exchange) = Exchange::of_known(object)
            && let Some(read) = exchange.read(object)?
        {
            return on_device(Self::foreign(read)).map(Some);
        }
        if let Ok(class) = object.cast::<PyType>() {
            return Err(PyTypeError::new_err(format!(
                "{} is a class, not a tensor; pass an object of it",
                class.qualname()?
            )));
        }
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Self::native(py, tensor.get()).map(Some);
        }
        if object.cast::<Mapping>().is_ok() {
            return Err(exception(py, &Error::SharedOn { ptr: DevicePtr::NULL }));
        }
        if object.hasattr("untyped_storage")? {
            return on_device(Self::foreign(torch(object)?)).map(Some);
        }
        if let Ok(interface) = object.getattr("__cuda_array_interface__") {
            return Ok(Some(Self::foreign(cuda_array_interface::import(object, &interface)?)));
        }
        if object.hasattr("__dlpack__")? {
            return on_device(Self::foreign(dlpack::import(object)?)).map(Some);
        }
        Ok(None)
    }

    fn native(py: Python<'_>, tensor: &Tensor) -> PyResult<Self> {
        let data = &tensor.data;
        let layout = TensorLayout::strided(data.dtype(), data.shape(), data.strides());
        let layout = layout.map_err(Error::from).or_raise(py)?;
        let owner = SourceOwner::Native(data.keeper.clone());
        let (backend, region, is_writable) = (data.backend, data.range, data.is_writable);
        Ok(Self { backend, device: region.device, region, layout, is_writable, owner })
    }

    fn foreign(tensor: Foreign) -> Self {
        let Foreign { backend, ordinal, ptr, layout, is_writable, owner } = tensor;
        let device = device_here(backend, ordinal);
        let region = DeviceRange::new(device, DevicePtr::new(ptr), layout.span_bytes());
        Self { backend, device, region, layout, is_writable, owner: SourceOwner::Object(owner) }
    }

    /// Returns the memory for a ring, and what keeps it allocated for tensors in its slots.
    pub(crate) fn kept(self) -> (OwnedRegion<Arc<Owner>>, Keeper) {
        let (region, owner, _) = self.parts();
        let owner = Arc::new(owner);
        let keeper = Keeper::Owned(Arc::clone(&owner) as _);
        // SAFETY: as in `owned`.
        (unsafe { OwnedRegion::new(owner, region) }, keeper)
    }

    /// Returns the memory and its layout.
    fn owned(self) -> (OwnedRegion<Owner>, TensorLayout) {
        let (region, owner, layout) = self.parts();
        // SAFETY: the owner keeps the memory allocated: a guard of this library, or a Python object by the rules of its
        // protocol.
        (unsafe { OwnedRegion::new(owner, region) }, layout)
    }

    fn parts(self) -> (Region, Owner, TensorLayout) {
        let owner = match self.owner {
            SourceOwner::Object(object) => Owner::Object(PyOwner::new(object)),
            SourceOwner::Native(keeper) => Owner::Native(keeper),
        };
        let region = Region::new(self.backend, self.region).with_dtype(self.layout.dtype());
        (region, owner, self.layout)
    }
}

/// Refuses memory of the host, unless a backend with such memory is in use.
fn on_device(source: Source) -> PyResult<Source> {
    if !backend::is_host(source.backend) || host_backend().is_some() {
        return Ok(source);
    }
    Err(host_memory())
}

/// Returns the error for memory of the host. A mapping's errors name the tensor in addition.
fn host_memory() -> PyErr {
    PlacementError::new_err(format!(
        "the tensor is in host memory (device \"cpu\"), and only memory of a device can be shared: move it to the device first, as \
         tensor.to({:?}) does, or leave it out",
        backend::kinds().next().unwrap_or_default()
    ))
}

/// Returns the device of memory that a framework sees as memory of the host, where it has one device.
pub(crate) fn device_here(backend: &str, ordinal: u32) -> DeviceOrdinal {
    if backend::is_host(backend) { 0.into() } else { ordinal.into() }
}

/// Reads a tensor of PyTorch without DLPack, which has fewer element types. The storage keeps the memory.
fn torch(tensor: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    if let Some(exchange) = Exchange::of_torch(tensor.py())
        && let Some(read) = exchange.read(tensor)?
    {
        return Ok(read);
    }
    let refused = |why: &str| Err(PyTypeError::new_err(format!("cannot share the tensor: {why}")));
    let is = |name: &str| -> PyResult<bool> { tensor.call_method0(name)?.is_truthy() };
    if tensor.getattr("layout")?.str()?.to_cow()? != "torch.strided" {
        return refused("it is sparse; share its parts (indices, values)");
    }
    if tensor.getattr("is_quantized")?.is_truthy()? {
        return refused(
            "it is quantized, and its scale does not lie in the memory; share int_repr() and the scale",
        );
    }
    if tensor.getattr("is_nested")?.is_truthy()? {
        return refused("it is nested; share values() and offsets()");
    }
    if is("is_conj")? || is("is_neg")? {
        return refused("it is a lazy conjugate or negative; call resolve_conj() and resolve_neg() first");
    }
    let device = tensor.getattr("device")?;
    let kind: String = device.getattr("type")?.extract()?;
    let Some(backend) = backend::named(&kind) else {
        let known = backend::device_names("");
        return refused(&format!("it is on {kind:?}; tensors on {known} can be shared"));
    };
    let shape: Vec<i64> = tensor.getattr("shape")?.extract()?;
    let strides: Vec<i64> = tensor.call_method0("stride")?.extract()?;
    Ok(Foreign {
        backend,
        ordinal: device.getattr("index")?.extract::<Option<u32>>()?.unwrap_or(0),
        ptr: tensor.call_method0("data_ptr")?.extract()?,
        layout: dlpack::layout(tensor.py(), dtype(&tensor.getattr("dtype")?)?, &shape, &strides)?,
        is_writable: true,
        owner: tensor.call_method0("untyped_storage")?.unbind(),
    })
}

/// Shares one tensor, or a mapping of names to tensors.
///
/// With access="r" importers may only read. A kernel that writes does not change the bytes, and ends the importer's use of the
/// device; under MPS also the exporter's.
///
/// `tensors` is a tensor of any framework, or a mapping of names to tensors. `name` names a single tensor. `ready` is the
/// stream, or a list of streams, whose work so far writes the bytes; by default the framework's current stream.
/// `exposure` says what happens if importers reach bytes beside the tensors: `"allow"` shares, `"refuse"` raises,
/// `"copy"` shares a copy. `allow_users` lists user ids that may open the memory beside this user; by default none.
///
/// Raises `TypeError` for an object that is no tensor of device memory, `UnsupportedError` if the memory is of a kind that
/// cannot be shared or by `exposure="refuse"`, `LayoutError` for strides or sizes that cannot, `ForkedError` in a child of
/// fork, and `ValueError` for an invalid argument.
#[pyfunction]
#[pyo3(signature = (tensors, *, name=None, access="rw", ready=None, exposure="allow", allow_users=None))]
pub(crate) fn share(
    py: Python<'_>,
    tensors: &Bound<'_, PyAny>,
    name: Option<String>,
    access: &str,
    ready: Option<&Bound<'_, PyAny>>,
    exposure: &str,
    allow_users: Option<Vec<u32>>,
) -> PyResult<Export> {
    let access = self::access(Some(access))?.unwrap_or(device_ipc::Access::ReadWrite);
    let exposure = match exposure {
        "allow" => ExposurePolicy::Allow,
        "refuse" => ExposurePolicy::Refuse,
        "copy" => ExposurePolicy::Copy,
        other => {
            let text = format!("exposure is {other:?}; expected \"allow\", \"refuse\" or \"copy\"");
            return Err(PyValueError::new_err(text));
        }
    };
    let users = allow_users.unwrap_or_default();
    let entry_point = |backend: &str| ipc_for_users(py, Some(backend), &users);
    let mut named = NamedTensors::new(py, &entry_point, None);
    match (Source::read(py, tensors)?, name) {
        (Some(source), Some(name)) => named.add(&name, source)?,
        (Some(source), None) => {
            let (ipc, device) = (entry_point(source.backend)?, source.device);
            let streams = streams(py, ready, &ipc, &[device])?;
            let options = Options { access, exposure, streams: &streams };
            let (owner, layout) = source.owned();
            let shared = py.detach(|| options.start_one(&ipc, owner, &layout));
            return shared.or_raise(py).map(|export| Export::new(export, device));
        }
        (None, Some(_)) => {
            return Err(PyTypeError::new_err(
                "name is for one tensor; the names of several are the keys of a mapping",
            ));
        }
        (None, None) => named.add_all("share", tensors)?,
    }
    let Some((ipc, set, devices)) = named.finish() else {
        return Err(PyValueError::new_err("there is no tensor to share"));
    };
    let streams = streams(py, ready, &ipc, &devices)?;
    let options = Options { access, exposure, streams: &streams };
    let shared = py.detach(|| options.apply(ipc.share_all(set)).start());
    shared.or_raise(py).map(|export| Export::new(export, devices[0]))
}

/// Shares one tensor without a name, read-write, behind no work. Returns the export with its entry point.
pub(crate) fn start(py: Python<'_>, source: Source) -> PyResult<(device_ipc::Export, Ipc)> {
    let ipc = ipc_in_use(py, Some(source.backend))?;
    let options =
        Options { access: device_ipc::Access::ReadWrite, exposure: ExposurePolicy::Allow, streams: &[] };
    let (owner, layout) = source.owned();
    let shared = py.detach(|| options.start_one(&ipc, owner, &layout));
    Ok((shared.or_raise(py)?, ipc))
}

struct Options<'a> {
    access: device_ipc::Access,
    exposure: ExposurePolicy,
    streams: &'a [StreamArg],
}

impl<'a> Options<'a> {
    fn apply<O: Send + 'static>(&self, builder: ShareBuilder<'a, O>) -> ShareBuilder<'a, O> {
        let builder = builder.access(self.access).exposure(self.exposure);
        self.streams.iter().fold(builder, |builder, stream| builder.ready_on(stream))
    }

    fn start_one(
        &self,
        ipc: &'a Ipc,
        owner: OwnedRegion<Owner>,
        layout: &TensorLayout,
    ) -> device_ipc::Result<device_ipc::Export> {
        let builder = ipc.share(owner).dtype(layout.dtype()).shape(layout.shape()).strides(layout.strides());
        Ok(self.apply(builder).start()?)
    }
}

/// Returns the streams that write the tensors on these devices: those that the caller named, or those that the framework submits to.
fn streams(
    py: Python<'_>,
    ready: Option<&Bound<'_, PyAny>>,
    ipc: &Ipc,
    devices: &[DeviceOrdinal],
) -> PyResult<Vec<StreamArg>> {
    let several =
        |list: &Bound<'_, PyAny>| list.is_instance_of::<PyList>() || list.is_instance_of::<PyTuple>();
    match ready {
        None => {
            let current = devices.iter().map(|device| StreamArg::current(py, ipc, *device));
            Ok(current.collect::<PyResult<Vec<_>>>()?.into_iter().flatten().collect())
        }
        Some(list) if several(list) => {
            list.try_iter()?.map(|stream| StreamArg::parse(&stream?, ipc, devices[0])).collect()
        }
        Some(stream) => Ok(vec![StreamArg::parse(stream, ipc, devices[0])?]),
    }
}
