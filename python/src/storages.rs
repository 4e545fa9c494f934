//! The storages of PyTorch that `torch.multiprocessing` passes through this library: the three methods that
//! `device_ipc/_torch_install.py` replaces, without Python code for each storage.
//!
//! No lock is held while Python code runs, an object is dropped or the interpreter lock is released.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use device_ipc::{
    AsStream as _, Descriptor, DeviceOrdinal, DevicePtr, DeviceRange, Error, ErrorKind, OwnedRegion, Region,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;
use pyo3::{ffi, intern};

use crate::error::{OrRaise as _, StaleError};
use crate::exchange::Exchange;
use crate::grant;
use crate::mapping_inner::MappingInner;
use crate::owner::PyOwner;
use crate::session::ipc_in_use;
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor, TensorData, device_name};
use crate::uses::{self, Use};
use crate::{backend, dlpack, wait};

/// The references to the object of a storage that only this module has: that of its entry, and that of its export's owner.
const OWN_REFERENCES: isize = 2;

/// Storages to look at in each call of `share`.
const LOOKS: usize = 1;

/// A storage that this process has shared.
struct Shared {
    storage: Py<PyAny>,
    /// Taken at the end.
    export: Option<device_ipc::Export>,
    /// The descriptor, as it travels in payloads.
    handle: Py<PyBytes>,
    device: DeviceOrdinal,
    is_host: bool,
    ptr: u64,
    nbytes: u64,
    is_watched: AtomicBool,
}

impl Shared {
    fn export(&self) -> &device_ipc::Export {
        self.export.as_ref().expect("taken at the end")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let export = self.export.take();
        // Where the interpreter is shutting down, the process ends with its exports.
        Python::try_attach(|py| py.detach(|| drop(export)));
    }
}

/// Memory of another process, in which this process has a storage as long as the mapping exists.
struct Received {
    handle: Py<PyBytes>,
    /// Not the mapping, which would keep the memory open.
    mapping: Weak<MappingInner>,
}

#[derive(Default)]
struct State {
    /// By the number of the storage (`_cdata`).
    shared: HashMap<u64, Arc<Shared>>,
    by_handle: HashMap<Vec<u8>, u64>,
    /// By the address of the memory and that of the mapping, several of which may have the memory open.
    received: BTreeMap<(u64, usize), Received>,
    received_limit: usize,
    /// The storages to look at next.
    next: Vec<u64>,
}

/// What changes of holders set.
struct Stir {
    /// Whether the callable was called since the last call of `look`.
    is_stirred: AtomicBool,
    callable: Py<PyAny>,
}

impl Stir {
    fn stir(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_stirred.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.callable.call0(py).map(drop)
    }
}

/// The storages that this process has shared or received. Those that it has shared are kept until no process uses them.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct Storages {
    state: Mutex<State>,
    stir: Arc<Stir>,
    lifetime: Mutex<f64>,
}

impl Storages {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lifetime(&self) -> PyResult<Duration> {
        wait::limit(Some(*self.lifetime.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Returns the entry of a storage that is shared, unless `resize_` has replaced its memory since.
    fn known(&self, py: Python<'_>, cdata: u64, ptr: u64, nbytes: u64) -> Option<Arc<Shared>> {
        let known = self.lock().shared.get(&cdata).cloned()?;
        if (known.ptr, known.nbytes) == (ptr, nbytes) {
            return Some(known);
        }
        self.remove(py, cdata, &known);
        None
    }

    /// Returns the payload's descriptor and the mapping of memory of another process.
    fn received(&self, py: Python<'_>, place: &Place) -> Option<(Py<PyBytes>, Arc<MappingInner>)> {
        let state = self.lock();
        let at_address = state.received.range((place.ptr, 0)..=(place.ptr, usize::MAX));
        let known: Vec<_> =
            at_address.map(|(_, one)| (one.handle.clone_ref(py), one.mapping.clone())).collect();
        drop(state);
        known.into_iter().find_map(|(handle, mapping)| {
            let mapping = mapping.upgrade()?;
            if place.is_in(&mapping) {
                return Some((handle, mapping));
            }
            // The last reference ends a lease.
            py.detach(|| drop(mapping));
            None
        })
    }

    /// Shares the memory of a storage as one region of bytes, behind the work of the current stream. An importer of one storage
    /// receives leases on the next ones of the same block of the allocator.
    fn add(&self, storage: &Bound<'_, PyAny>, place: &Place, cdata: u64) -> PyResult<Arc<Shared>> {
        let py = storage.py();
        let ipc = ipc_in_use(py, Some(place.backend))?;
        let range = DeviceRange::new(place.device, DevicePtr::new(place.ptr), place.nbytes);
        let stream = StreamArg::of_torch(py, &ipc, place.device)?;
        let owner = PyOwner::new(storage.clone().unbind());
        // SAFETY: a storage keeps its memory allocated.
        let owned = unsafe { OwnedRegion::new(owner, Region::new(place.backend, range)) };
        let started = py.detach(|| {
            let builder = ipc.share(owned).lease_ahead();
            match &stream {
                Some(stream) => builder.ready_on(stream).start(),
                None => builder.start(),
            }
        });
        let export = started.or_raise(py)?;
        let bytes = export.descriptor().to_bytes();
        let shared = Arc::new(Shared {
            storage: storage.clone().unbind(),
            handle: PyBytes::new(py, &bytes).unbind(),
            export: Some(export),
            device: place.device,
            is_host: backend::is_host(place.backend),
            ptr: place.ptr,
            nbytes: place.nbytes,
            is_watched: AtomicBool::new(false),
        });
        let mut state = self.lock();
        // Another thread may have shared it meanwhile: all payloads of a storage name one export.
        let entry = Arc::clone(state.shared.entry(cdata).or_insert_with(|| Arc::clone(&shared)));
        if Arc::ptr_eq(&entry, &shared) {
            state.by_handle.insert(bytes, cdata);
        }
        drop(state);
        self.stir.stir(py)?;
        Ok(entry)
    }

    fn remove(&self, py: Python<'_>, cdata: u64, known: &Arc<Shared>) {
        let mut state = self.lock();
        if !state.shared.get(&cdata).is_some_and(|found| Arc::ptr_eq(found, known)) {
            return;
        }
        let removed = state.shared.remove(&cdata);
        state.by_handle.remove(known.handle.as_bytes(py));
        drop(state);
        drop(removed);
    }

    /// Looks at some of the storages, each time at others.
    fn look_at(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        for _ in 0..count {
            let mut state = self.lock();
            if state.next.is_empty() {
                state.next = state.shared.keys().copied().collect();
            }
            let Some(cdata) = state.next.pop() else { return Ok(()) };
            let shared = state.shared.get(&cdata).cloned();
            drop(state);
            if let Some(shared) = shared {
                self.look_at_one(py, cdata, &shared)?;
            }
        }
        Ok(())
    }

    /// Ends the export of a storage that neither this process nor another one uses.
    fn look_at_one(&self, py: Python<'_>, cdata: u64, shared: &Arc<Shared>) -> PyResult<()> {
        // SAFETY: the entry has a reference to the object.
        let references = unsafe { ffi::Py_REFCNT(shared.storage.as_ptr()) };
        if references > OWN_REFERENCES || use_count(py, cdata)? > 1 {
            return Ok(());
        }
        if !shared.is_watched.swap(true, Ordering::AcqRel) {
            let stir = Arc::clone(&self.stir);
            shared.export().on_change(move || {
                if !stir.is_stirred.load(Ordering::Acquire) {
                    Python::try_attach(|py| stir.stir(py).map_err(|error| error.write_unraisable(py, None)));
                }
            });
        }
        let is_used = py.detach(|| {
            shared.export().recall();
            shared.export().holders().iter().len() > 0
        });
        if !is_used {
            self.remove(py, cdata, shared);
        }
        Ok(())
    }

    fn note_received(&self, ptr: u64, handle: &Bound<'_, PyBytes>, mapping: &Arc<MappingInner>) {
        let mapping = Arc::downgrade(mapping);
        let key = (ptr, mapping.as_ptr() as usize);
        let received = Received { handle: handle.clone().unbind(), mapping };
        let mut state = self.lock();
        let mut ended = Vec::new();
        if state.received.len() >= state.received_limit.max(128) {
            let is_ended = |one: &&Received| one.mapping.strong_count() == 0;
            let keys: Vec<_> =
                state.received.iter().filter(|(_, one)| is_ended(one)).map(|(key, _)| *key).collect();
            ended.extend(keys.iter().map(|key| state.received.remove(key)));
            state.received_limit = 2 * state.received.len();
        }
        ended.push(state.received.insert(key, received));
        drop(state);
        drop(ended);
    }

    /// Opens the memory that a payload names, and returns a storage in it.
    fn open_other(
        &self,
        py: Python<'_>,
        device: DeviceOrdinal,
        handle: &Bound<'_, PyBytes>,
        nbytes: u64,
        grant: &Bound<'_, PyBytes>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let descriptor = Descriptor::from_bytes(handle.as_bytes()).map_err(Error::from).or_raise(py)?;
        let grant = if is_grant(grant.as_bytes()) { Some(grant::parse(py, grant.as_any())?) } else { None };
        let ipc = ipc_in_use(py, Some(descriptor.backend()))?;
        let backend = ipc.backend().info().name;
        let stream = StreamArg::of_torch(py, &ipc, device)?.map(Arc::new);
        let call = || {
            let mut builder = ipc.open(&descriptor);
            if let Some(grant) = &grant {
                builder = builder.grant(grant)?;
            }
            match &stream {
                Some(stream) => builder.on(&**stream),
                None => builder.on_device(device),
            }
        };
        let mapping = wait::interruptible(py, call)?.map_err(|error| {
            if let Some(grant) = &grant {
                grant.give_back();
            }
            refused(py, &error)
        })?;
        let inner = Arc::new(MappingInner::new(mapping, backend, stream, false));
        uses::note(&inner);
        let region =
            inner.read(py, |mapping| mapping.regions().next())?.filter(|region| region.len >= nbytes);
        let Some(region) = region else {
            let found = inner.nbytes;
            return Err(StaleError::new_err(format!("the payload names {nbytes} B of memory of {found} B")));
        };
        let data =
            TensorData::bytes(backend, region, inner.is_writable(), Keeper::Mapping(Use::only(&inner)));
        let storage = match Exchange::of_torch(py) {
            // An extension of PyTorch, such as torch_npu, has storages of a kind of its own, which only its functions make.
            Some(exchange) if backend::dlpack_type(backend) != Some(dlpack::EXTENSION) => {
                exchange.make(py, &data)?.call_method0(intern!(py, "untyped_storage"))?
            }
            _ => make.call1((Tensor { data },))?,
        };
        self.note_received(region.ptr.get(), handle, &inner);
        Ok(storage.unbind())
    }
}

#[pymethods]
impl Storages {
    /// Creates a record of storages. `wake` is called, without arguments, when there is something to look at.
    #[new]
    fn new(wake: Py<PyAny>) -> Self {
        let stir = Arc::new(Stir { is_stirred: AtomicBool::new(false), callable: wake });
        Self { state: Mutex::default(), stir, lifetime: Mutex::new(600.0) }
    }

    /// Seconds for which a payload that no process opens keeps its memory.
    #[getter]
    fn payload_lifetime(&self) -> f64 {
        *self.lifetime.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[setter]
    fn set_payload_lifetime(&self, seconds: f64) {
        *self.lifetime.lock().unwrap_or_else(PoisonError::into_inner) = seconds;
    }

    /// Returns the part of a payload that names the storage, of this size in bytes: what PyTorch's own method returns.
    #[expect(clippy::type_complexity, reason = "a tuple of PyTorch")]
    fn share<'py>(
        &self,
        storage: &Bound<'py, PyAny>,
        nbytes: u64,
    ) -> PyResult<(u32, Py<PyBytes>, u64, u64, Bound<'py, PyBytes>, u64, Bound<'py, PyBytes>, bool)> {
        let py = storage.py();
        let cdata = number_of(storage)?;
        let place = Place::of(storage, nbytes)?;
        let lifetime = self.lifetime()?;
        let (handle, grant) = if let Some((handle, mapping)) = self.received(py, &place) {
            let granted = mapping.read(py, |mapping| py.detach(|| mapping.grant(lifetime)));
            // The last reference ends a lease.
            py.detach(|| drop(mapping));
            (handle, granted?.or_raise(py)?)
        } else {
            let shared = match self.known(py, cdata, place.ptr, place.nbytes) {
                Some(shared) => {
                    // A receiver that has the storage waits for nothing, so what was written since has to be complete.
                    let ipc = ipc_in_use(py, Some(place.backend))?;
                    if let Some(stream) = StreamArg::of_torch(py, &ipc, place.device)? {
                        py.detach(|| ipc.backend().memory().synchronize(stream.as_stream())).or_raise(py)?;
                    }
                    shared
                }
                None => self.add(storage, &place, cdata)?,
            };
            let granted = shared.export().grant(lifetime).or_raise(py)?;
            (shared.handle.clone_ref(py), granted)
        };
        self.look_at(py, LOOKS)?;
        let grant = PyBytes::new(py, &grant.to_bytes());
        Ok((place.device.get(), handle, place.nbytes, 0, grant, 0, PyBytes::new(py, b""), false))
    }

    /// Returns a storage in the memory that a payload names. `make` makes one of a tensor, for frameworks without functions for it.
    fn open(
        &self,
        py: Python<'_>,
        device: u32,
        handle: &Bound<'_, PyBytes>,
        nbytes: u64,
        grant: &Bound<'_, PyBytes>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let device = DeviceOrdinal::new(device);
        let state = self.lock();
        let own = state.by_handle.get(handle.as_bytes()).and_then(|cdata| state.shared.get(cdata)).cloned();
        drop(state);
        if let Some(shared) = own.filter(|shared| shared.is_host || shared.device == device) {
            // A payload of this process.
            if is_grant(grant.as_bytes()) {
                grant::parse(py, grant.as_any())?.give_back();
            }
            return Ok(shared.storage.clone_ref(py));
        }
        self.open_other(py, device, handle, nbytes, grant, make)
    }

    /// Looks at some of the storages, and ends the exports of those that no process uses.
    fn look(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.stir.is_stirred.store(false, Ordering::Release);
        let all = self.lock().shared.len();
        self.look_at(py, count.min(all))
    }

    /// Ends the exports of all storages that are no longer used.
    fn collect(&self, py: Python<'_>) -> PyResult<()> {
        let all: Vec<_> = self.lock().shared.iter().map(|(cdata, one)| (*cdata, Arc::clone(one))).collect();
        all.into_iter().try_for_each(|(cdata, shared)| self.look_at_one(py, cdata, &shared))
    }

    /// Whether there is something to look at since the last look.
    #[getter]
    fn is_stirred(&self) -> bool {
        self.stir.is_stirred.load(Ordering::Acquire)
    }

    /// The devices of the storages in memory of other processes.
    fn devices(&self, py: Python<'_>) -> Vec<String> {
        let known: Vec<_> = self.lock().received.values().map(|one| one.mapping.clone()).collect();
        let mappings: Vec<_> = known.iter().filter_map(Weak::upgrade).collect();
        let devices = mappings.iter().map(|one| device_name(one.backend, one.device.get())).collect();
        py.detach(|| drop(mappings));
        devices
    }

    /// The number of storages that this process has shared.
    fn __len__(&self) -> usize {
        self.lock().shared.len()
    }
}

/// The place of a storage's memory.
struct Place {
    backend: &'static str,
    device: DeviceOrdinal,
    ptr: u64,
    nbytes: u64,
}

impl Place {
    fn of(storage: &Bound<'_, PyAny>, nbytes: u64) -> PyResult<Self> {
        let py = storage.py();
        let device = storage.getattr(intern!(py, "device"))?;
        let (backend, index) =
            TorchDevice::with(&device, |known| (backend::named(&known.kind), known.index))?;
        Ok(Self {
            backend: backend.expect("the methods of devices that can be shared are replaced"),
            device: index.into(),
            ptr: storage.call_method0(intern!(py, "data_ptr"))?.extract()?,
            nbytes,
        })
    }

    /// Returns whether the storage is in memory that this mapping has open at the same address.
    fn is_in(&self, mapping: &MappingInner) -> bool {
        let is_there = self.device == mapping.device || backend::is_host(self.backend);
        is_there && self.backend == mapping.backend && self.nbytes <= mapping.nbytes
    }
}

/// A `torch.device`, which takes less time to compare than to read: its `type` is a new string each time.
struct TorchDevice {
    device: Py<PyAny>,
    kind: String,
    index: u32,
}

impl TorchDevice {
    /// Calls a function with the attributes of a device.
    fn with<T>(device: &Bound<'_, PyAny>, call: impl FnOnce(&Self) -> T) -> PyResult<T> {
        static KNOWN: Mutex<Vec<Arc<TorchDevice>>> = Mutex::new(Vec::new());
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut position = 0;
        loop {
            let Some(next) = known().get(position).cloned() else { break };
            if device.eq(&next.device)? {
                return Ok(call(&next));
            }
            position += 1;
        }
        let kind = device.getattr(intern!(device.py(), "type"))?.extract()?;
        let index: Option<u32> = device.getattr(intern!(device.py(), "index"))?.extract()?;
        let read = Arc::new(Self { device: device.clone().unbind(), kind, index: index.unwrap_or(0) });
        known().push(Arc::clone(&read));
        Ok(call(&read))
    }
}

fn is_grant(bytes: &[u8]) -> bool {
    bytes.starts_with(b"DIPG")
}

fn number_of(storage: &Bound<'_, PyAny>) -> PyResult<u64> {
    storage.getattr(intern!(storage.py(), "_cdata"))?.extract()
}

/// Returns the number of references of PyTorch to the storage.
fn use_count(py: Python<'_>, cdata: u64) -> PyResult<u64> {
    static COUNT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let count = COUNT.get_or_try_init(py, || -> PyResult<_> {
        Ok(py.import("torch._C")?.getattr("_storage_Use_Count")?.unbind())
    })?;
    count.call1(py, (cdata,))?.extract(py)
}

/// Returns the exception of a payload whose memory cannot be opened.
fn refused(py: Python<'_>, error: &Error) -> PyErr {
    let cause = crate::error::exception(py, error);
    if !matches!(error.kind(), ErrorKind::Gone | ErrorKind::Closed | ErrorKind::Stale) {
        return cause;
    }
    let text = format!("the payload is stale: its memory is gone ({error}); send the tensor again");
    let stale = StaleError::new_err(text);
    stale.set_cause(py, Some(cause));
    stale
}
