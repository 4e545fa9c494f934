//! The storages of PyTorch that `torch.multiprocessing` passes through this library: the three methods that
//! `device_ipc/_torch_install.py` replaces, without Python code for each storage.
//!
//! Storages in one block of the allocator have one export, that of the block. A storage has a ticket in a table of claims, and each
//! payload of it has one: a receiver that has the block open claims the storage and releases the payload by changes of words in shared
//! memory. A storage has an export of its own if it lies in several blocks, or if its bytes were not ready when it was sent.
//!
//! No lock is held while Python code runs, an object is dropped or the interpreter lock is released.

mod block;
mod claim;
mod payload;
mod place;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use device_ipc::{
    AsStream as _, Descriptor, DeviceOrdinal, DeviceRange, Error, ErrorKind, Ipc, Mapping, OwnedRegion,
    Region,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use pyo3::{ffi, intern};

use block::{Block, Blocks, InBlock, Tickets};
pub(crate) use claim::Claim;
use claim::{Peer, Releases};
use payload::Right;
use place::{Place, number_of, use_count};

use crate::error::{OrRaise as _, StaleError};
use crate::exchange::Exchange;
use crate::mapping_inner::MappingInner;
use crate::owner::PyOwner;
use crate::session::ipc_in_use;
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor, TensorData, device_name};
use crate::uses::{self, Use};
use crate::{backend, dlpack, wait};

/// Storages to look at in each call of `share`.
const LOOKS: usize = 1;

/// A storage that this process has shared.
struct Shared {
    by: By,
    storage: Py<PyAny>,
    /// The handle, as it travels in payloads.
    handle: Py<PyBytes>,
    device: DeviceOrdinal,
    is_host: bool,
    ptr: u64,
    nbytes: u64,
}

/// What shares a storage.
enum By {
    Block(InBlock),
    Export(Alone),
}

/// An export of one storage.
struct Alone {
    /// Taken at the end.
    export: Option<device_ipc::Export>,
    is_watched: AtomicBool,
}

impl Alone {
    fn export(&self) -> &device_ipc::Export {
        self.export.as_ref().expect("taken at the end")
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let export = self.export.take();
        // Where the interpreter is shutting down, the process ends with its exports.
        Python::try_attach(|py| py.detach(|| drop(export)));
    }
}

impl Shared {
    /// Returns the number of references to the storage's object that only this module has: that of its entry, and that of the owner of
    /// an export.
    const fn own_references(&self) -> isize {
        match self.by {
            By::Block(_) => 1,
            By::Export(_) => 2,
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let By::Block(part) = &mut self.by else { return };
        Python::try_attach(|py| {
            let storage = PyOwner::new(self.storage.clone_ref(py));
            py.detach(|| part.end(storage));
        });
    }
}

/// A block of another process that this process has open.
struct OpenBlock {
    /// Not the mapping, which would keep the memory open.
    mapping: Weak<MappingInner>,
    range: DeviceRange,
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
    /// Storages that nobody uses, each the last one of a block that another process may have open.
    ending: Vec<Arc<Shared>>,
    /// By the descriptor and the device.
    blocks: HashMap<Vec<u8>, Vec<OpenBlock>>,
    /// By the number of their tables of claims.
    peers: HashMap<u64, Arc<Peer>>,
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
    tickets: OnceLock<Tickets>,
    shared_blocks: Blocks,
    releases: Releases,
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

    /// Returns the tickets of this process.
    fn tickets(&self, py: Python<'_>) -> PyResult<&Tickets> {
        if let Some(tickets) = self.tickets.get() {
            return Ok(tickets);
        }
        let tickets = Tickets::new().or_raise(py)?;
        Ok(self.tickets.get_or_init(|| tickets))
    }

    /// Shares a storage, behind the work of the current stream.
    fn add(&self, storage: &Bound<'_, PyAny>, place: &Place, cdata: u64) -> PyResult<Arc<Shared>> {
        let py = storage.py();
        let ipc = ipc_in_use(py, Some(place.backend))?;
        let stream = StreamArg::of_torch(py, &ipc, place.device)?;
        let tickets = self.tickets(py)?;
        let in_block = || {
            // An importer that has the block open waits for nothing.
            let memory = ipc.backend().memory();
            let is_ready =
                stream.as_ref().is_none_or(|stream| memory.is_complete(stream.as_stream()).unwrap_or(false));
            if is_ready { self.shared_blocks.place(&ipc, place.range(), tickets) } else { None }
        };
        let (by, handle) = match py.detach(in_block) {
            Some(part) => {
                let (table, ticket, offset) = (tickets.number, part.ticket, part.offset);
                let descriptor = &part.block().descriptor;
                let handle = payload::InBlock { table, ticket, offset, descriptor }.to_bytes(py);
                (By::Block(part), handle)
            }
            None => {
                let export = share_alone(storage, place, &ipc, stream.as_ref())?;
                let handle = PyBytes::new(py, &export.descriptor().to_bytes());
                (By::Export(Alone { export: Some(export), is_watched: AtomicBool::new(false) }), handle)
            }
        };
        let bytes = handle.as_bytes().to_vec();
        let shared = Arc::new(Shared {
            by,
            storage: storage.clone().unbind(),
            handle: handle.unbind(),
            device: place.device,
            is_host: backend::is_host(place.backend),
            ptr: place.ptr,
            nbytes: place.nbytes,
        });
        let mut state = self.lock();
        // Another thread may have shared it meanwhile: all payloads of a storage have one handle.
        let entry = Arc::clone(state.shared.entry(cdata).or_insert_with(|| Arc::clone(&shared)));
        let is_new = Arc::ptr_eq(&entry, &shared);
        if is_new {
            state.by_handle.insert(bytes, cdata);
        }
        drop(state);
        if let (false, By::Block(part)) = (is_new, &shared.by) {
            part.withdraw(tickets);
        }
        self.stir.stir(py)?;
        Ok(entry)
    }

    /// Forgets a storage whose memory was replaced.
    fn remove(&self, py: Python<'_>, cdata: u64, known: &Arc<Shared>) {
        if let (By::Block(part), Some(tickets)) = (&known.by, self.tickets.get()) {
            part.withdraw(tickets);
        }
        self.take(py, cdata, known);
    }

    /// Removes the entry of a storage. Returns whether it was there.
    fn take(&self, py: Python<'_>, cdata: u64, known: &Arc<Shared>) -> bool {
        let mut state = self.lock();
        if !state.shared.get(&cdata).is_some_and(|found| Arc::ptr_eq(found, known)) {
            return false;
        }
        let removed = state.shared.remove(&cdata);
        state.by_handle.remove(known.handle.as_bytes(py));
        drop(state);
        drop(removed);
        true
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

    /// Ends the sharing of a storage that neither this process nor another one uses.
    fn look_at_one(&self, py: Python<'_>, cdata: u64, shared: &Arc<Shared>) -> PyResult<()> {
        // SAFETY: the entry has a reference to the object.
        let references = unsafe { ffi::Py_REFCNT(shared.storage.as_ptr()) };
        if references > shared.own_references() || use_count(py, cdata)? > 1 {
            return Ok(());
        }
        match &shared.by {
            By::Block(part) => {
                let tickets = self.tickets(py)?;
                if tickets.table.is_crowded() && self.is_open_elsewhere(py, part.block())
                    || !part.take_back(tickets)
                {
                    return Ok(());
                }
                if !part.leave() {
                    self.lock().ending.push(Arc::clone(shared));
                }
                self.take(py, cdata, shared);
                self.look_at_ending(py);
            }
            By::Export(alone) => {
                if !alone.is_watched.swap(true, Ordering::AcqRel) {
                    alone.export().on_change(self.stirring());
                }
                let is_used = py.detach(|| {
                    alone.export().recall();
                    alone.export().holders().iter().len() > 0
                });
                if !is_used {
                    self.take(py, cdata, shared);
                }
            }
        }
        Ok(())
    }

    /// Releases the last storages of blocks that no other process has open any longer, or in which others are shared meanwhile.
    fn look_at_ending(&self, py: Python<'_>) {
        let ending = self.lock().ending.clone();
        for shared in ending {
            let By::Block(part) = &shared.by else { continue };
            if part.leave() || !self.is_open_elsewhere(py, part.block()) {
                self.lock().ending.retain(|other| !Arc::ptr_eq(other, &shared));
            }
        }
    }

    fn is_open_elsewhere(&self, py: Python<'_>, block: &Block) -> bool {
        let changed = self.stirring();
        py.detach(|| block.is_open_elsewhere(changed))
    }

    /// Returns a callback for changes of holders.
    fn stirring(&self) -> impl Fn() + Send + Sync + 'static {
        let stir = Arc::clone(&self.stir);
        move || {
            if !stir.is_stirred.load(Ordering::Acquire) {
                Python::try_attach(|py| stir.stir(py).map_err(|error| error.write_unraisable(py, None)));
            }
        }
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

    /// Opens the memory of an export, by a grant if there is one. The current stream waits until it is ready.
    fn map(
        py: Python<'_>,
        device: DeviceOrdinal,
        descriptor: &[u8],
        grant: Option<&device_ipc::Grant>,
    ) -> PyResult<(Arc<MappingInner>, DeviceRange, Ipc)> {
        let descriptor = Descriptor::from_bytes(descriptor).map_err(Error::from).or_raise(py)?;
        let ipc = ipc_in_use(py, Some(descriptor.backend()))?;
        let backend = ipc.backend().info().name;
        let stream = StreamArg::of_torch(py, &ipc, device)?.map(Arc::new);
        let call = || {
            let mut builder = ipc.open(&descriptor);
            if let Some(grant) = grant {
                builder = builder.grant(grant)?;
            }
            match &stream {
                Some(stream) => builder.on(&**stream),
                None => builder.on_device(device),
            }
        };
        let mapping = wait::interruptible(py, call)?.map_err(|error| refused(py, &error))?;
        let range =
            mapping.regions().next().unwrap_or(DeviceRange::new(device, device_ipc::DevicePtr::NULL, 0));
        let inner = Arc::new(MappingInner::new(mapping, backend, stream, false));
        uses::note(&inner);
        Ok((inner, range, ipc))
    }

    /// Opens the memory that a payload names, and returns a storage in it.
    fn open_export(
        &self,
        py: Python<'_>,
        device: DeviceOrdinal,
        handle: &Bound<'_, PyBytes>,
        nbytes: u64,
        right: Option<Right<'_>>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let grant = match right {
            Some(Right::Grant(grant)) => Some(parse_grant(py, grant)?),
            _ => None,
        };
        let opened = Self::map(py, device, handle.as_bytes(), grant.as_ref());
        let (inner, range, _) = opened.inspect_err(|_| {
            if let Some(grant) = &grant {
                grant.give_back();
            }
        })?;
        self.make(py, (Use::only(&inner), range), handle, nbytes, make)
    }

    /// Claims a storage in a block of another process, which is opened if it is not yet.
    fn open_in_block(
        &self,
        py: Python<'_>,
        device: DeviceOrdinal,
        (handle, place): (&Bound<'_, PyBytes>, &payload::InBlock<'_>),
        nbytes: u64,
        right: Option<Right<'_>>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let claimed = self.open_block(py, device, place).and_then(|(inner, block, peer)| {
            inner.read(py, Mapping::check)?.map_err(|error| refused(py, &error))?;
            Ok((inner, block, peer.claim(place.ticket, device)))
        });
        // What the payload keeps is kept by the claim now, or gone.
        self.give_back(py, right)?;
        let (inner, block, claim) = claimed?;
        let Some(claim) = claim else { return Err(stale("its process has released it")) };
        let range = block.slice(place.offset, nbytes).ok_or_else(|| outside(nbytes, block.len))?;
        self.make(py, (Use::claimed(&inner, claim), range), handle, nbytes, make)
    }

    /// Returns the mapping of a block of another process, and the claims on what that process shares.
    fn open_block(
        &self,
        py: Python<'_>,
        device: DeviceOrdinal,
        place: &payload::InBlock<'_>,
    ) -> PyResult<(Arc<MappingInner>, DeviceRange, Arc<Peer>)> {
        let state = self.lock();
        let blocks = state.blocks.get(place.descriptor).map_or(&[][..], Vec::as_slice);
        let open = blocks.iter().find_map(|block| {
            if block.range.device == device { Some((block.mapping.upgrade()?, block.range)) } else { None }
        });
        let peer = state.peers.get(&place.table).cloned();
        drop(state);
        if let (Some((inner, range)), Some(peer)) = (&open, &peer) {
            return Ok((Arc::clone(inner), *range, Arc::clone(peer)));
        }
        let (inner, range, ipc) = Self::map(py, device, place.descriptor, None)?;
        let peer = match peer {
            Some(peer) => peer,
            None => {
                let received = Arc::clone(&inner);
                let claims = wait::aside(py, move || received.try_read(Mapping::claims))?;
                let claims = claims.unwrap_or(Err(Error::Suspended)).or_raise(py)?;
                let peer = Peer::new(claims, ipc, &self.releases).or_raise(py)?;
                let mut state = self.lock();
                // Those of which this process has no storages may have terminated.
                let unused: Vec<_> = state.peers.extract_if(|_, peer| Arc::strong_count(peer) == 1).collect();
                let peer = Arc::clone(state.peers.entry(place.table).or_insert(peer));
                drop(state);
                drop(unused);
                peer
            }
        };
        let mut state = self.lock();
        let mut ended = Vec::new();
        state.blocks.retain(|_, blocks| {
            ended.extend(blocks.extract_if(.., |block| block.mapping.strong_count() == 0));
            !blocks.is_empty()
        });
        let opened = OpenBlock { mapping: Arc::downgrade(&inner), range };
        state.blocks.entry(place.descriptor.to_vec()).or_default().push(opened);
        drop(state);
        Ok((inner, range, peer))
    }

    /// Gives the right of a payload back that is not used, or no longer needed.
    fn give_back(&self, py: Python<'_>, right: Option<Right<'_>>) -> PyResult<()> {
        match right {
            Some(Right::Ticket { table, ticket }) => {
                let peer = self.lock().peers.get(&table).cloned();
                match (peer, self.tickets.get()) {
                    (Some(peer), _) => peer.release_payload(ticket),
                    (None, Some(own)) if own.number == table => own.table.withdraw(ticket),
                    // It ends at its time limit.
                    (None, _) => {}
                }
            }
            Some(Right::Grant(grant)) => parse_grant(py, grant)?.give_back(),
            Some(Right::GrantOfBlock(grant)) => parse_grant(py, grant)?.give_back_soon(),
            None => {}
        }
        Ok(())
    }

    /// Returns a storage in a mapping. `make` makes one of a tensor, for frameworks without functions for it.
    fn make(
        &self,
        py: Python<'_>,
        (used, range): (Arc<Use>, DeviceRange),
        handle: &Bound<'_, PyBytes>,
        nbytes: u64,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        if range.len < nbytes {
            return Err(outside(nbytes, range.len));
        }
        let inner = Arc::clone(&used.inner);
        let data = TensorData::bytes(inner.backend, range, inner.is_writable(), Keeper::Mapping(used));
        let storage = match Exchange::of_torch(py) {
            // An extension of PyTorch, such as torch_npu, has storages of a kind of its own, which only its functions make.
            Some(exchange) if backend::dlpack_type(inner.backend) != Some(dlpack::EXTENSION) => {
                exchange.make(py, &data)?.call_method0(intern!(py, "untyped_storage"))?
            }
            _ => make.call1((Tensor { data },))?,
        };
        self.note_received(range.ptr.get(), handle, &inner);
        Ok(storage.unbind())
    }
}

#[pymethods]
impl Storages {
    /// Creates a record of storages. `wake` is called, without arguments, when there is something to look at.
    #[new]
    fn new(wake: Py<PyAny>) -> Self {
        let stir = Arc::new(Stir { is_stirred: AtomicBool::new(false), callable: wake });
        Self {
            state: Mutex::default(),
            tickets: OnceLock::new(),
            shared_blocks: Blocks::default(),
            releases: Releases::default(),
            stir,
            lifetime: Mutex::new(600.0),
        }
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
        let (handle, right) = if let Some((handle, mapping)) = self.received(py, &place) {
            let granted = mapping.read(py, |mapping| py.detach(|| mapping.grant(lifetime)));
            // The last reference ends a lease.
            py.detach(|| drop(mapping));
            let grant = granted?.or_raise(py)?.to_bytes();
            let is_in_block = payload::InBlock::parse(handle.as_bytes(py)).is_some();
            let right = if is_in_block { Right::GrantOfBlock(&grant) } else { Right::Grant(&grant) };
            (handle, right.to_bytes(py))
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
            let right = match &shared.by {
                By::Block(part) => {
                    let tickets = self.tickets(py)?;
                    let ticket = part.grant(tickets, lifetime).or_raise(py)?;
                    Right::Ticket { table: tickets.number, ticket }.to_bytes(py)
                }
                By::Export(alone) => {
                    Right::Grant(&alone.export().grant(lifetime).or_raise(py)?.to_bytes()).to_bytes(py)
                }
            };
            (shared.handle.clone_ref(py), right)
        };
        self.look_at(py, LOOKS)?;
        Ok((place.device.get(), handle, place.nbytes, 0, right, 0, PyBytes::new(py, b""), false))
    }

    /// Returns a storage in the memory that a payload names. `make` makes one of a tensor, for frameworks without functions for it.
    fn open(
        &self,
        py: Python<'_>,
        device: u32,
        handle: &Bound<'_, PyBytes>,
        nbytes: u64,
        right: &Bound<'_, PyBytes>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let device = DeviceOrdinal::new(device);
        let right = Right::parse(right.as_bytes())?;
        let state = self.lock();
        let own = state.by_handle.get(handle.as_bytes()).and_then(|cdata| state.shared.get(cdata)).cloned();
        drop(state);
        if let Some(shared) = own.filter(|shared| shared.is_host || shared.device == device) {
            // A payload of this process.
            self.give_back(py, right)?;
            return Ok(shared.storage.clone_ref(py));
        }
        match payload::InBlock::parse(handle.as_bytes()) {
            Some(place) => self.open_in_block(py, device, (handle, &place?), nbytes, right, make),
            None => self.open_export(py, device, handle, nbytes, right, make),
        }
    }

    /// Gives the right of a payload back whose storage this process has already.
    fn release(&self, py: Python<'_>, right: &Bound<'_, PyBytes>) -> PyResult<()> {
        self.give_back(py, Right::parse(right.as_bytes())?)
    }

    /// Looks at some of the storages, and ends the exports of those that no process uses.
    fn look(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.stir.is_stirred.store(false, Ordering::Release);
        let all = self.lock().shared.len();
        self.look_at_ending(py);
        self.look_at(py, count.min(all))
    }

    /// Ends the exports of all storages that are no longer used.
    fn collect(&self, py: Python<'_>) -> PyResult<()> {
        self.look_at_ending(py);
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
        let state = self.lock();
        state.shared.len() + state.ending.len()
    }
}

/// Shares a storage as one region of bytes. An importer of one storage receives leases on the next ones of the same block of the
/// allocator.
fn share_alone(
    storage: &Bound<'_, PyAny>,
    place: &Place,
    ipc: &Ipc,
    stream: Option<&StreamArg>,
) -> PyResult<device_ipc::Export> {
    let py = storage.py();
    let owner = PyOwner::new(storage.clone().unbind());
    // SAFETY: a storage keeps its memory allocated.
    let owned = unsafe { OwnedRegion::new(owner, Region::new(place.backend, place.range())) };
    let started = py.detach(|| {
        let builder = ipc.share(owned).lease_ahead();
        match stream {
            Some(stream) => builder.ready_on(stream).start(),
            None => builder.start(),
        }
    });
    started.or_raise(py)
}

fn parse_grant(py: Python<'_>, grant: &[u8]) -> PyResult<device_ipc::Grant> {
    device_ipc::Grant::from_bytes(grant).or_raise(py)
}

fn outside(nbytes: u64, found: u64) -> PyErr {
    StaleError::new_err(format!("the payload names {nbytes} B of memory of {found} B"))
}

fn stale(why: impl std::fmt::Display) -> PyErr {
    StaleError::new_err(format!("the payload is stale: its memory is gone ({why}); send the tensor again"))
}

/// Returns the exception of a payload whose memory cannot be opened.
fn refused(py: Python<'_>, error: &Error) -> PyErr {
    let cause = crate::error::exception(py, error);
    if !matches!(error.kind(), ErrorKind::Gone | ErrorKind::Closed | ErrorKind::Stale) {
        return cause;
    }
    let stale = stale(error);
    stale.set_cause(py, Some(cause));
    stale
}
