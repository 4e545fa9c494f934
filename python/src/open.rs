//! Opening memory of another process.

use std::sync::Arc;
use std::time::Instant;

use device_ipc::{Descriptor, DeviceIdentity, DeviceMap, DeviceName, Error, Ipc, KeeperExport, OpenBuilder};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{OrRaise as _, exception};
use crate::export::parse;
use crate::keeper;
use crate::mapping::Mapping;
use crate::mapping_inner::{MappingInner, ReservedOpen};
use crate::pull;
use crate::reservation::Reserving;
use crate::session::{DeviceArg, access, copy_policy, ipc_for_users};
use crate::stream::StreamArg;
use crate::tensor::device_name;
use crate::wait;

/// Where memory is opened.
#[derive(Clone)]
pub(crate) enum Place {
    Home,
    On(device_ipc::DeviceOrdinal),
    Mapped(DeviceMap),
}

impl Place {
    /// Parses the argument `device`: `None` for the home device, a device, or a dict from identities of the exporter's devices
    /// to devices here.
    pub(crate) fn parse(
        py: Python<'_>,
        ipc: &Ipc,
        device: Option<&Bound<'_, PyAny>>,
        descriptor: &Descriptor,
    ) -> PyResult<Self> {
        let Some(device) = device else { return Ok(Self::Home) };
        if let Ok(pairs) = device.cast::<PyDict>() {
            return device_map(py, ipc, pairs, descriptor.homes()).map(Self::Mapped);
        }
        let parsed = DeviceArg::parse(device)?;
        let backend = ipc.backend().info().name;
        if parsed.backend.is_some_and(|named| named != backend) {
            return Err(PyValueError::new_err(format!(
                "the memory is of the backend {backend}, not on the device {device}"
            )));
        }
        Ok(Self::On(parsed.ordinal))
    }

    /// Returns the stream that the memory is opened on: the caller's, or that of the framework in use.
    pub(crate) fn stream(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        ipc: &Ipc,
    ) -> PyResult<Option<StreamArg>> {
        match self {
            Self::On(device) => {
                let found = StreamArg::given_or_current(py, stream, ipc, *device)?;
                found.as_ref().map_or(Ok(()), |stream| stream.check_device(*device))?;
                Ok(found)
            }
            Self::Home | Self::Mapped(_) => {
                let found = stream.map(|stream| StreamArg::parse(stream, ipc, 0.into())).transpose()?;
                if let (Self::Mapped(map), Some(stream)) = (self, &found) {
                    let devices = py.detach(|| ipc.devices()).or_raise(py)?;
                    let own = devices.iter().find(|device| device.ordinal == stream.device());
                    let is_target = |(_, to): &(DeviceName, DeviceName)| {
                        *to == stream.device().into() || own.is_some_and(|own| *to == own.identity.into())
                    };
                    if !map.pairs().iter().any(is_target) {
                        return Err(stream.of_another_device("on the devices of the map"));
                    }
                }
                Ok(found)
            }
        }
    }
}

/// Reads a map from devices of the sender to devices of the receiver: identities (`Device.uuid`), names such as `"cuda:1"`, or
/// ordinals.
pub(crate) fn device_map(
    py: Python<'_>,
    ipc: &Ipc,
    pairs: &Bound<'_, PyDict>,
    homes: impl Iterator<Item = DeviceIdentity>,
) -> PyResult<DeviceMap> {
    let devices = py.detach(|| ipc.devices()).or_raise(py)?;
    let known: Vec<_> = devices.iter().map(|device| device.identity).chain(homes).collect();
    let parse = |device: &Bound<'_, PyAny>| -> PyResult<DeviceName> {
        let text = device.str()?.to_cow()?.into_owned();
        if let Some(identity) = known.iter().find(|identity| identity.to_string() == text) {
            return Ok((*identity).into());
        }
        let named = DeviceArg::parse(device).map_err(|_| {
            PyValueError::new_err(format!(
                "the device map names {text:?}; expected an ordinal, a name such as {:?}, or the identity of a device that \
                 this process sees (Device.uuid)",
                device_name(ipc.backend().info().name, 1)
            ))
        })?;
        Ok(named.ordinal.into())
    };
    pairs
        .iter()
        .try_fold(DeviceMap::new(), |map, (from, to)| map.insert(parse(&from)?, parse(&to)?).or_raise(py))
}

/// Opens memory of another process.
///
/// Returns a `Mapping` of names to tensors. `descriptor` is a `Descriptor`, its text or its bytes, or `"keeper:NAME"` for
/// the memory that a keeper has under this name.
///
/// `device` is a device here, such as `"cuda:1"`, or a dict from the exporter's devices to devices here; by default the
/// memory's home device. `access` is `"r"` or `"rw"`; by default that of the export. `stream` is the stream that waits
/// until the bytes are ready, by default the framework's current one on `device`; without a stream this call waits.
/// `copy` is the condition of a copy, and the way: `"never"`; `"if-needed"`, where the memory cannot be opened: through the memory of
/// this host, or over the network from another one; `"staged-if-needed"` and `"pulled-if-needed"` only through this host or only
/// over the network; and in any case `"always"`, `"staged"`, `"pulled"`. `timeout` limits the wait for the exporter, in seconds; `None` is no limit.
/// `allow_read_only` permits DLPack capsules of read-only memory for frameworks that ignore that flag.
///
/// `allow_users` lists user ids whose exports may be opened beside those of this user; by default none. `grant` is a
/// right to open the export once, of `Export.grant`. `progress` is called with the number of bytes that have been copied
/// and the number of all bytes, on any thread. `reserved` maps the memory at addresses that the mapping keeps, for
/// `Mapping.suspend`, `resume`, `replace` and `follow`; each of these has the time limit and the users of this call. It is `True`, or a
/// pair of a `Reservation` and an offset in it in bytes.
///
/// Raises `StaleError` if the export has ended, `GoneError` if its process has, `PlacementError` if the device cannot
/// reach the memory or another mapping has the addresses, `LayoutError` for a place in which the memory does not fit, `UnsupportedError` for `reserved` and memory of another kind, `NotPermittedError` if the access or this user is not permitted, `TimeoutError` after `timeout`
/// seconds, `DescriptorError` if the text is no descriptor, `ForkedError` in a child of fork, and `ValueError` for arguments
/// that are invalid or contradict each other.
#[pyfunction]
#[pyo3(signature = (
    descriptor, *, device=None, access=None, stream=None, copy="never", timeout=30.0, allow_users=None,
    allow_read_only=false, grant=None, progress=None, reserved=None
))]
#[expect(clippy::too_many_arguments, reason = "keywords of Python")]
pub(crate) fn open(
    py: Python<'_>,
    descriptor: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    access: Option<&str>,
    stream: Option<&Bound<'_, PyAny>>,
    copy: &str,
    timeout: Option<f64>,
    allow_users: Option<Vec<u32>>,
    allow_read_only: bool,
    grant: Option<&Bound<'_, PyAny>>,
    progress: Option<Py<PyAny>>,
    reserved: Option<&Bound<'_, PyAny>>,
) -> PyResult<Mapping> {
    let grant = grant.map(|grant| crate::grant::parse(py, grant)).transpose()?;
    let (access, copy, reserved) = (self::access(access)?, copy_policy(copy)?, Reserving::parse(reserved)?);
    let whole = wait::limit(timeout)?;
    let mut limit = whole;
    let begun = Instant::now();
    let (ipc, source) = if let Some(name) = keeper::name_of(descriptor)? {
        check_no_grant(grant.is_some())?;
        let backend = device.and_then(|device| DeviceArg::parse(device).ok()?.backend);
        let ipc = ipc_for_users(py, backend, &allow_users.unwrap_or_default())?;
        let kept = keeper::find(py, &ipc, &name, limit)?;
        limit = limit.saturating_sub(begun.elapsed());
        (ipc, Source::Kept(Box::new(kept)))
    } else {
        let descriptor = parse(py, descriptor)?;
        (
            ipc_for_users(py, Some(descriptor.backend()), &allow_users.unwrap_or_default())?,
            Source::Descriptor(descriptor),
        )
    };
    let place = Place::parse(py, &ipc, device, source.descriptor())?;
    let stream = place.stream(py, stream, &ipc)?;
    let backend = ipc.backend().info().name;
    let stream = stream.map(Arc::new);
    let report = progress.map(pull::report);
    let call = || {
        // A keeper's name leaves less of the time to this open, and not to those of further versions.
        let limit = if reserved.is_reserved() { whole } else { limit };
        let mut builder = reserved.set(source.open(&ipc).timeout(limit).copy(copy));
        if let Some(access) = access {
            builder = builder.access(access);
        }
        if let Some(report) = &report {
            builder = builder.on_progress(report);
        }
        if let Some(grant) = &grant {
            builder = builder.grant(grant)?;
        }
        match (&stream, &place) {
            (_, Place::Mapped(map)) => builder.on_mapped_devices(map),
            (Some(stream), _) => builder.on(&**stream),
            (None, Place::Home) => builder.at_home(),
            (None, Place::On(device)) => builder.on_device(*device),
        }
    };
    let mapping = wait::interruptible(py, call)?.or_raise(py)?;
    let mut inner = MappingInner::new(mapping, backend, stream, allow_read_only);
    inner.reserved = reserved.is_reserved().then_some(ReservedOpen { ipc, limit: whole });
    let mapping = Mapping::new(inner);
    reserved.note(&mapping.inner()?);
    Ok(mapping)
}

fn check_no_grant(is_given: bool) -> PyResult<()> {
    if is_given {
        return Err(PyValueError::new_err(
            "a keeper gives the right to open itself; open its name without grant=",
        ));
    }
    Ok(())
}

/// The next version of the memory at reserved addresses.
pub(crate) struct NextVersion<'a> {
    source: Source,
    grant: Option<device_ipc::Grant>,
    by: &'a ReservedOpen,
}

impl<'a> NextVersion<'a> {
    /// Reads the arguments of `resume` and `replace`, and asks a keeper that is named.
    pub(crate) fn parse(
        py: Python<'_>,
        inner: &'a MappingInner,
        descriptor: &Bound<'_, PyAny>,
        grant: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let grant = grant.map(|grant| crate::grant::parse(py, grant)).transpose()?;
        let name = keeper::name_of(descriptor)?;
        let parsed = if name.is_some() { None } else { Some(parse(py, descriptor)?) };
        let by = inner.reserved.as_ref().ok_or_else(|| {
            let why = "its addresses end with its memory; open it with reserved=True";
            let what = "take another version of a mapping whose addresses are not reserved".to_owned();
            exception(py, &Error::Unsupported { backend: inner.backend, what, why: why.to_owned() })
        })?;
        let source = match (name, parsed) {
            (Some(name), _) => {
                check_no_grant(grant.is_some())?;
                Source::Kept(Box::new(keeper::find(py, &by.ipc, &name, by.limit)?))
            }
            (None, parsed) => Source::Descriptor(parsed.expect("one of the two")),
        };
        Ok(Self { source, grant, by })
    }

    pub(crate) fn builder(&self) -> device_ipc::Result<OpenBuilder<'_>> {
        let builder = self.source.open(&self.by.ipc).timeout(self.by.limit);
        self.grant.iter().try_fold(builder, OpenBuilder::grant)
    }
}

/// The source of the right to open memory.
enum Source {
    Descriptor(Descriptor),
    /// The answer of a keeper, which can be opened once even if the keeper replaces its export meanwhile.
    Kept(Box<KeeperExport>),
}

impl Source {
    fn descriptor(&self) -> &Descriptor {
        match self {
            Self::Descriptor(descriptor) => descriptor,
            Self::Kept(kept) => kept.descriptor(),
        }
    }

    fn open<'a>(&'a self, ipc: &'a Ipc) -> OpenBuilder<'a> {
        match self {
            Self::Descriptor(descriptor) => ipc.open(descriptor),
            Self::Kept(kept) => kept.open(),
        }
    }
}
