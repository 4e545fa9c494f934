//! Ranges of addresses in which exports are opened side by side.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use device_ipc::{DevicePtr, DeviceRange, Error, OpenBuilder, TensorLayout};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::mapping_inner::MappingInner;
use crate::memory::{dtype, parse_shape};
use crate::session::{DeviceArg, check_fork, ipc, not_picklable, note_use};
use crate::tensor::{Keeper, Tensor, TensorData, device_name};
use crate::uses::Use;

/// A range of addresses of this process on one device, without memory: `open(…, reserved=(reservation, offset))` maps the memory
/// of an export in it, `offset` bytes behind its start, and `tensor` is one tensor over several of them.
///
/// `device` is a name such as `"cuda:1"` or an ordinal. `nbytes` is rounded up to a multiple of `granularity`. With `address`, the
/// range begins there, so that the memory has equal addresses in several processes; otherwise at one that is free in this process.
/// Choose an address far from those of drivers, such as 16 TiB (`1 << 44`): what is free here is often not free elsewhere.
///
/// The addresses stay reserved until this object and all mappings in it have been dropped.
///
/// Raises `PlacementError` if `address` is in use in this process or there is no such device, `LayoutError` for 0 bytes and an
/// address that the device cannot reserve, `UnsupportedError` if the backend has no such ranges, and `BackendError` if no backend has
/// devices.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Reservation {
    reservation: device_ipc::Reservation,
    backend: &'static str,
    mappings: Mutex<Vec<Weak<MappingInner>>>,
}

impl Reservation {
    /// Returns the mappings in the range.
    fn mappings(&self) -> Vec<Arc<MappingInner>> {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        mappings.retain(|mapping| mapping.strong_count() > 0);
        mappings.iter().filter_map(Weak::upgrade).collect()
    }
}

#[pymethods]
impl Reservation {
    #[new]
    #[pyo3(signature = (device, nbytes, address=None))]
    fn new(py: Python<'_>, device: &Bound<'_, PyAny>, nbytes: u64, address: Option<u64>) -> PyResult<Self> {
        let device = DeviceArg::parse(device)?;
        let ipc = ipc(py, device.backend)?;
        note_use();
        let reserve = || match address {
            None => ipc.reserve(device.ordinal, nbytes),
            Some(address) => {
                ipc.reserve_at(DeviceRange::new(device.ordinal, DevicePtr::new(address), nbytes))
            }
        };
        let reservation = py.detach(reserve).or_raise(py)?;
        Ok(Self { reservation, backend: ipc.backend().info().name, mappings: Mutex::default() })
    }

    /// The first address, for the reservations of other processes.
    #[getter]
    fn address(&self) -> u64 {
        self.reservation.range().ptr.get()
    }

    /// The length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.reservation.range().len
    }

    /// The device, such as `"cuda:1"`.
    #[getter]
    fn device(&self) -> String {
        device_name(self.backend, self.reservation.range().device.get())
    }

    /// The unit of offsets in bytes: allocations begin at multiples of it and fill whole units.
    #[getter]
    fn granularity(&self) -> u64 {
        self.reservation.granularity()
    }

    /// Returns a tensor over the memory of the mappings that it lies in, which it keeps mapped. Its elements lie one after the other,
    /// from `offset` bytes behind the start of the range on. `shape` and `dtype` are those of `empty`.
    ///
    /// Raises `LayoutError` if there is no memory at one of its bytes, `Error` if a part is suspended, and `ValueError` for an invalid
    /// argument.
    #[pyo3(signature = (shape, dtype, *, offset=0))]
    fn tensor(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<Tensor> {
        check_fork()?;
        let (shape, dtype) = (parse_shape(shape)?, self::dtype(dtype)?);
        let element = dtype.bytes().unwrap_or(1);
        if !offset.is_multiple_of(element) {
            let text = format!("the offset {offset} is not a multiple of the element's {element} B");
            return Err(PyValueError::new_err(text));
        }
        let layout = TensorLayout::contiguous(dtype, shape);
        let layout = layout.and_then(|layout| layout.with_element_offset(offset / element));
        let layout = layout.map_err(Error::from).or_raise(py)?;
        let (start, end) = (offset, layout.span_bytes().max(offset));
        let wanted = self.reservation.range().slice(start, end - start);
        let overlaps = |found: DeviceRange| {
            wanted.is_none_or(|wanted| found.end() > Some(wanted.ptr) && Some(found.ptr) < wanted.end())
        };
        let (mappings, (range, access)) = loop {
            let mut mappings = self.mappings();
            let mut failed = Ok(());
            mappings.retain(|inner| {
                // Waits while another thread exchanges the memory.
                let overlaps = inner.read(py, |mapping| mapping.regions().any(overlaps));
                overlaps.unwrap_or_else(|error| {
                    failed = Err(error);
                    false
                })
            });
            failed?;
            let call = |mappings: &[&device_ipc::Mapping]| {
                let tensor = self.reservation.tensor(mappings, &layout)?;
                Ok((tensor.range(), tensor.access()))
            };
            if let Some(found) = with_all(&mappings, &[], &call) {
                break (mappings, found.or_raise(py)?);
            }
        };
        let used = |inner: &Arc<MappingInner>| Use::new(inner, "(tensor of a reservation)".to_owned());
        let keeper = Keeper::SideBySide(mappings.iter().map(used).collect());
        let data = TensorData::new(self.backend, range, &layout, access.is_writable(), keeper);
        Ok(Tensor { data })
    }

    fn __repr__(&self) -> String {
        let range = self.reservation.range();
        format!("<device_ipc.Reservation of {} B at {} on {}>", range.len, range.ptr, self.device())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Reservation", "send its address, and reserve it in the other process"))
    }
}

type Found = device_ipc::Result<(DeviceRange, device_ipc::Access)>;

/// Calls a function with all mappings; `None` while another thread exchanges the memory of one.
fn with_all(
    inners: &[Arc<MappingInner>],
    mappings: &[&device_ipc::Mapping],
    call: &dyn Fn(&[&device_ipc::Mapping]) -> Found,
) -> Option<Found> {
    let Some((next, rest)) = inners.split_first() else { return Some(call(mappings)) };
    next.try_read(|mapping| with_all(rest, &[mappings, &[mapping]].concat(), call))?
}

/// The argument `reserved` of `open`.
pub(crate) enum Reserving {
    No,
    Alone,
    In(Py<Reservation>, u64),
}

impl Reserving {
    pub(crate) fn parse(argument: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(argument) = argument else { return Ok(Self::No) };
        if let Ok(is_reserved) = argument.extract::<bool>() {
            return Ok(if is_reserved { Self::Alone } else { Self::No });
        }
        let pair = argument.extract::<(Bound<'_, Reservation>, u64)>();
        let (reservation, offset) = pair.map_err(|_| {
            PyTypeError::new_err(
                "reserved is True, False, or a pair of a Reservation and an offset in it in bytes",
            )
        })?;
        Ok(Self::In(reservation.unbind(), offset))
    }

    pub(crate) const fn is_reserved(&self) -> bool {
        !matches!(self, Self::No)
    }

    pub(crate) fn set<'a>(&'a self, builder: OpenBuilder<'a>) -> OpenBuilder<'a> {
        match self {
            Self::No => builder,
            Self::Alone => builder.reserved(),
            Self::In(reservation, offset) => builder.reserved_in(&reservation.get().reservation, *offset),
        }
    }

    /// Records the mapping for tensors over several.
    pub(crate) fn note(&self, mapping: &Arc<MappingInner>) {
        if let Self::In(reservation, _) = self {
            let mut mappings = reservation.get().mappings.lock().unwrap_or_else(PoisonError::into_inner);
            mappings.push(Arc::downgrade(mapping));
        }
    }
}
