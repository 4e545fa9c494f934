//! PyTorch tensors in the memory of a mapping.

use std::sync::Arc;

use device_ipc::{DeviceOrdinal, DeviceRange};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dtype::to_dlpack;
use crate::exchange::Exchange;
use crate::mapping_inner::MappingInner;
use crate::stream::DlpackStream;
use crate::tensor::{Keeper, Tensor, TensorData, prepare};
use crate::uses::Use;
use crate::{backend, dlpack};

/// Returns views of all tensors; see `Mapping._torch_views`.
pub(crate) fn torch_views<'py>(
    py: Python<'py>,
    inner: &Arc<MappingInner>,
    other: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    // An extension of PyTorch, such as torch_npu, has storages of a kind of its own, which only its functions make.
    if backend::dlpack_type(inner.backend) == Some(dlpack::EXTENSION) {
        return Ok(None);
    }
    let Some(exchange) = Exchange::of_torch(py) else { return Ok(None) };
    let mut devices: Vec<DeviceOrdinal> = Vec::new();
    let (regions, tensors) = inner.view(py, |mapping| {
        let data = |(position, (_, tensor)): (usize, (&str, device_ipc::Tensor<'_>))| {
            let keeper = Keeper::Mapping(Use::view(inner, position));
            TensorData::new(inner.backend, tensor.range(), tensor.layout(), inner.is_writable(), keeper)
        };
        let tensors: Vec<_> = mapping.tensors().enumerate().map(data).collect();
        (mapping.regions().collect::<Vec<_>>(), tensors)
    })?;
    for region in regions {
        if !devices.contains(&region.device) {
            devices.push(region.device);
            wait_ready(py, inner, region)?;
        }
    }
    let firsts = firsts(&tensors);
    let (views, mut made) = (PyDict::new(py), Vec::<Bound<'py, PyAny>>::with_capacity(tensors.len()));
    for (((name, _), data), first) in inner.contents.tensors().zip(tensors).zip(firsts) {
        let first = first.map(|first| &made[first]);
        let view = if first.is_none() && to_dlpack(data.dtype()).is_some() {
            exchange.make(py, &data)?
        } else {
            other.call1((Tensor { data }, first))?
        };
        views.set_item(name, &view)?;
        made.push(view);
    }
    Ok(Some(views))
}

/// Returns for each tensor the position of the first one at the same place, if that is another.
fn firsts(tensors: &[TensorData]) -> Vec<Option<usize>> {
    let place = |position: &usize| tensors[*position].range;
    let mut firsts = vec![None; tensors.len()];
    let mut order: Vec<usize> = (0..tensors.len()).filter(|position| place(position).len > 0).collect();
    // Stable: of tensors at the same place, the first one stays the first.
    order.sort_by_key(|position| (place(position).device, place(position).ptr, place(position).len));
    for same in order.chunk_by(|one, next| place(one) == place(next)) {
        same[1..].iter().for_each(|position| firsts[*position] = Some(same[0]));
    }
    firsts
}

/// Makes PyTorch's stream of the device wait for the bytes, as an import of a capsule does.
fn wait_ready(py: Python<'_>, inner: &Arc<MappingInner>, region: DeviceRange) -> PyResult<()> {
    let stream = if backend::is_host(inner.backend) {
        None
    } else {
        // Initialises PyTorch's use of the device.
        let kind = backend::kind(inner.backend);
        let stream =
            py.import("torch")?.getattr(kind)?.call_method1("current_stream", (region.device.get(),))?;
        // 0 is the legacy default stream, which is 1 in DLPack.
        Some(stream.getattr(format!("{kind}_stream"))?.extract::<i64>()?.max(1))
    };
    let keeper = Keeper::Mapping(Use::new(inner, String::new()));
    let bytes = TensorData::bytes(inner.backend, region, inner.is_writable(), keeper);
    prepare(py, &bytes, true, DlpackStream::new(stream))
}
