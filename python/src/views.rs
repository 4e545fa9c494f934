//! PyTorch tensors in the memory of a mapping.

use std::sync::{Arc, Mutex};

use device_ipc::{DeviceOrdinal, DeviceRange};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::dtype::to_dlpack;
use crate::exchange::Exchange;
use crate::managed_views::ManagedViews;
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
    let (regions, ranges) = inner.view(py, |mapping| {
        let ranges: Vec<_> = mapping.tensors().map(|(_, tensor)| tensor.range()).collect();
        (mapping.regions().collect::<Vec<_>>(), ranges)
    })?;
    for region in regions {
        if !devices.contains(&region.device) {
            devices.push(region.device);
            wait_ready(py, inner, region)?;
        }
    }
    let firsts = firsts(&ranges);
    let mut managed = ManagedViews::new(inner, &ranges)?;
    let (views, mut made) = (PyDict::new(py), Vec::<Bound<'py, PyAny>>::with_capacity(ranges.len()));
    let mut names = Names::take();
    for (((name, layout), range), first) in inner.contents.tensors().zip(ranges).zip(firsts) {
        let view = if first.is_none() && to_dlpack(layout.dtype()).is_some() {
            // SAFETY: DLPack has the element type, so that the description is valid; it was just taken.
            unsafe { exchange.make_managed(py, managed.take()) }?
        } else {
            managed.skip();
            let keeper = Keeper::Mapping(Use::new(inner, name.to_owned()));
            let data = TensorData::new(inner.backend, range, layout, inner.is_writable(), keeper);
            other.call1((Tensor { data }, first.map(|first| &made[first])))?
        };
        views.set_item(names.string(py, made.len(), name), &view)?;
        made.push(view);
    }
    names.keep();
    Ok(Some(views))
}

/// The strings of names, in the order of the tensors: a state dict that is opened again has the same.
struct Names(Vec<Py<PyString>>);

/// The names of the last views.
static LAST_NAMES: Mutex<Names> = Mutex::new(Names(Vec::new()));

/// Maximum number of names that are kept.
const MOST_NAMES: usize = 20_000;

impl Names {
    /// Takes those of the last views, unless another thread has them.
    fn take() -> Self {
        // A forked child may find the lock taken for ever.
        LAST_NAMES.try_lock().map_or(Self(Vec::new()), |mut last| Self(std::mem::take(&mut last.0)))
    }

    /// Returns the string of a name, whose position is not after the next new one.
    fn string<'py>(&mut self, py: Python<'py>, position: usize, name: &str) -> Bound<'py, PyString> {
        if let Some(known) = self.0.get(position).map(|known| known.bind(py))
            && known.to_str().is_ok_and(|known| known == name)
        {
            return known.clone();
        }
        let new = PyString::new(py, name);
        self.0.truncate(position);
        self.0.push(new.clone().unbind());
        new
    }

    /// Keeps them for the next views.
    fn keep(self) {
        if self.0.len() <= MOST_NAMES
            && let Ok(mut last) = LAST_NAMES.try_lock()
        {
            // Without the lock for the drop of those of another thread.
            let replaced = std::mem::replace(&mut *last, self);
            drop(last);
            drop(replaced);
        }
    }
}

/// Returns for each range the position of the first one that is the same, if that is another.
fn firsts(ranges: &[DeviceRange]) -> Vec<Option<usize>> {
    let place = |position: &usize| ranges[*position];
    let mut firsts = vec![None; ranges.len()];
    let mut order: Vec<usize> = (0..ranges.len()).filter(|position| place(position).len > 0).collect();
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
