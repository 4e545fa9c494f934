//! The storages that this process has shared, each kept until no process uses it.
//!
//! Neither the drop of the last tensor in this process nor the release of a claim by another one calls a function here. So storages are
//! looked at: some at each call of `share`, some by the thread of `_torch_install.py`, more often after calls of `wake`, and all by
//! `torch.cuda.ipc_collect`. A storage in a block has the states of `block.rs`; another one ends when its export has no holders.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use device_ipc::{AsStream as _, DeviceOrdinal, Ipc, OwnedRegion, Region};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::block::{Blocks, InBlock, Tickets, Usage};
use super::payload::{self, Right};
use super::place::{Place, number_of, use_count};
use crate::backend;
use crate::error::OrRaise as _;
use crate::owner::PyOwner;
use crate::session::ipc_in_use;
use crate::stream::StreamArg;

/// A storage that this process has shared.
struct SharedStorage {
    by: SharedBy,
    storage: Py<PyAny>,
    /// The handle, as it travels in payloads.
    handle: Py<PyBytes>,
    device: DeviceOrdinal,
    is_host: bool,
    ptr: u64,
    nbytes: u64,
}

/// The export that shares a storage.
enum SharedBy {
    Block(InBlock),
    Export(StorageExport),
}

/// An export of one storage.
struct StorageExport {
    /// Taken at the end.
    export: Option<device_ipc::Export>,
    is_watched: AtomicBool,
}

impl StorageExport {
    fn export(&self) -> &device_ipc::Export {
        self.export.as_ref().expect("taken at the end")
    }
}

impl Drop for StorageExport {
    fn drop(&mut self) {
        let export = self.export.take();
        // Where the interpreter is shutting down, the process ends with its exports.
        Python::try_attach(|py| py.detach(|| drop(export)));
    }
}

impl SharedStorage {
    /// Returns the number of references to the storage's object that only this module has: that of its entry, and that of the owner of
    /// an export.
    const fn own_references(&self) -> isize {
        match self.by {
            SharedBy::Block(_) => 1,
            SharedBy::Export(_) => 2,
        }
    }
}

impl Drop for SharedStorage {
    fn drop(&mut self) {
        let SharedBy::Block(part) = &mut self.by else { return };
        Python::try_attach(|py| {
            let storage = self.storage.clone_ref(py);
            py.detach(|| part.end(storage));
        });
    }
}

#[derive(Default)]
struct State {
    /// By the number of the storage (`_cdata`).
    storages: HashMap<u64, Arc<SharedStorage>>,
    by_handle: HashMap<Vec<u8>, u64>,
    /// The storages to look at next.
    next: Vec<u64>,
}

/// The call of `wake`, at new storages and at changes of holders: once until the next look.
struct Stir {
    /// Whether the callable was called since the last look.
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

/// The storages that this process has shared.
pub(super) struct SharedStorages {
    state: Mutex<State>,
    tickets: OnceLock<Tickets>,
    blocks: Blocks,
    stir: Arc<Stir>,
}

impl SharedStorages {
    /// `wake` is called, without arguments, when there is something to look at.
    pub(super) fn new(wake: Py<PyAny>) -> Self {
        let stir = Arc::new(Stir { is_stirred: AtomicBool::new(false), callable: wake });
        Self { state: Mutex::default(), tickets: OnceLock::new(), blocks: Blocks::default(), stir }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shares a storage, unless it is shared already. Returns its handle and the right of one payload, which lasts for `lifetime`.
    pub(super) fn share<'py>(
        &self,
        storage: &Bound<'py, PyAny>,
        place: &Place,
        lifetime: Duration,
    ) -> PyResult<(Py<PyBytes>, Bound<'py, PyBytes>)> {
        let py = storage.py();
        let cdata = number_of(storage)?;
        let shared = match self.known(py, cdata, place) {
            Some(shared) => {
                // A receiver that has the storage waits for nothing, so what was written since has to be complete.
                let ipc = ipc_in_use(py, Some(place.backend))?;
                if let Some(stream) = StreamArg::of_torch(py, &ipc, place.device)? {
                    py.detach(|| ipc.backend().memory().synchronize(stream.as_stream())).or_raise(py)?;
                }
                shared
            }
            None => self.add(storage, place, cdata)?,
        };
        let right = match &shared.by {
            SharedBy::Block(part) => {
                let tickets = self.tickets(py)?;
                let ticket = part.grant(tickets, lifetime).or_raise(py)?;
                Right::Ticket { table: tickets.number, ticket }.to_bytes(py)
            }
            SharedBy::Export(alone) => {
                Right::Grant(&alone.export().grant(lifetime).or_raise(py)?.to_bytes()).to_bytes(py)
            }
        };
        Ok((shared.handle.clone_ref(py), right))
    }

    /// Returns the storage that a handle of this process names, where `device` has its memory.
    pub(super) fn find(&self, py: Python<'_>, handle: &[u8], device: DeviceOrdinal) -> Option<Py<PyAny>> {
        let state = self.lock();
        let shared = state.by_handle.get(handle).and_then(|cdata| state.storages.get(cdata)).cloned();
        drop(state);
        let shared = shared.filter(|shared| shared.is_host || shared.device == device)?;
        Some(shared.storage.clone_ref(py))
    }

    /// Withdraws a payload of this process. One of another process is not known here.
    pub(super) fn withdraw_payload(&self, table: u64, ticket: u64) {
        if let Some(own) = self.tickets.get().filter(|own| own.number == table) {
            own.table.withdraw(ticket);
        }
    }

    /// Returns the entry of a storage that is shared, unless `resize_` has replaced its memory since.
    fn known(&self, py: Python<'_>, cdata: u64, place: &Place) -> Option<Arc<SharedStorage>> {
        let known = self.lock().storages.get(&cdata).cloned()?;
        if (known.ptr, known.nbytes) == (place.ptr, place.nbytes) {
            return Some(known);
        }
        self.remove(py, cdata, &known);
        None
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
    fn add(&self, storage: &Bound<'_, PyAny>, place: &Place, cdata: u64) -> PyResult<Arc<SharedStorage>> {
        let py = storage.py();
        let ipc = ipc_in_use(py, Some(place.backend))?;
        let stream = StreamArg::of_torch(py, &ipc, place.device)?;
        let tickets = self.tickets(py)?;
        let in_block = || {
            // An importer that has the block open waits for nothing.
            let memory = ipc.backend().memory();
            let is_ready =
                stream.as_ref().is_none_or(|stream| memory.is_complete(stream.as_stream()).unwrap_or(false));
            if is_ready { self.blocks.place(&ipc, place.range(), tickets, || self.stirring()) } else { None }
        };
        let (by, handle) = match py.detach(in_block) {
            Some(part) => {
                let (table, ticket, offset) = (tickets.number, part.ticket, part.offset);
                let descriptor = &part.block().descriptor;
                let handle = payload::InBlock { table, ticket, offset, descriptor }.to_bytes(py);
                (SharedBy::Block(part), handle)
            }
            None => {
                let export = share_alone(storage, place, &ipc, stream.as_ref())?;
                let handle = PyBytes::new(py, &export.descriptor().to_bytes());
                let is_watched = AtomicBool::new(false);
                (SharedBy::Export(StorageExport { export: Some(export), is_watched }), handle)
            }
        };
        let bytes = handle.as_bytes().to_vec();
        let shared = Arc::new(SharedStorage {
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
        let entry = Arc::clone(state.storages.entry(cdata).or_insert_with(|| Arc::clone(&shared)));
        let is_new = Arc::ptr_eq(&entry, &shared);
        if is_new {
            state.by_handle.insert(bytes, cdata);
        }
        drop(state);
        if let (false, SharedBy::Block(part)) = (is_new, &shared.by) {
            part.withdraw(tickets);
        }
        self.stir.stir(py)?;
        Ok(entry)
    }

    /// Forgets a storage whose memory was replaced.
    fn remove(&self, py: Python<'_>, cdata: u64, known: &Arc<SharedStorage>) {
        if let (SharedBy::Block(part), Some(tickets)) = (&known.by, self.tickets.get()) {
            part.withdraw(tickets);
        }
        self.take(py, cdata, known);
    }

    /// Removes the entry of a storage, unless another thread has removed it.
    fn take(&self, py: Python<'_>, cdata: u64, known: &Arc<SharedStorage>) {
        let mut state = self.lock();
        if !state.storages.get(&cdata).is_some_and(|found| Arc::ptr_eq(found, known)) {
            return;
        }
        let removed = state.storages.remove(&cdata);
        state.by_handle.remove(known.handle.as_bytes(py));
        drop(state);
        drop(removed);
    }

    /// Looks at some of the storages after a call of `wake`, which is called again from now on.
    pub(super) fn look(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.stir.is_stirred.store(false, Ordering::SeqCst);
        // PyO3 releases what other threads have dropped when a thread takes the interpreter lock. They call `wake` for what they drop from
        // now on.
        py.detach(|| ());
        let all = self.lock().storages.len();
        self.look_at(py, count.min(all))
    }

    /// Looks at all storages.
    pub(super) fn look_at_all(&self, py: Python<'_>) -> PyResult<()> {
        let all: Vec<_> = self.lock().storages.iter().map(|(cdata, one)| (*cdata, Arc::clone(one))).collect();
        all.into_iter().try_for_each(|(cdata, shared)| self.look_at_one(py, cdata, &shared))
    }

    /// Looks at some of the storages, each time at others.
    pub(super) fn look_at(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        for _ in 0..count {
            let mut state = self.lock();
            if state.next.is_empty() {
                state.next = state.storages.keys().copied().collect();
            }
            let Some(cdata) = state.next.pop() else { return Ok(()) };
            let shared = state.storages.get(&cdata).cloned();
            drop(state);
            if let Some(shared) = shared {
                self.look_at_one(py, cdata, &shared)?;
            }
        }
        Ok(())
    }

    /// Ends the sharing of a storage that neither this process nor another one uses.
    fn look_at_one(&self, py: Python<'_>, cdata: u64, shared: &Arc<SharedStorage>) -> PyResult<()> {
        // A tensor refers to the storage, by this Python object or without one.
        // SAFETY: the entry has a reference to the object.
        let references = unsafe { ffi::Py_REFCNT(shared.storage.as_ptr()) };
        if references > shared.own_references() || use_count(py, cdata)? > 1 {
            return Ok(());
        }
        match &shared.by {
            SharedBy::Block(part) => {
                match part.take_back(self.tickets(py)?) {
                    Usage::Used => return Ok(()),
                    // A later look finds it unused.
                    Usage::Draining => {
                        part.block().recall();
                        return Ok(());
                    }
                    Usage::Unused => {}
                }
                self.take(py, cdata, shared);
            }
            SharedBy::Export(alone) => {
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

    /// Returns a callback for changes of holders, and for ends of blocks.
    fn stirring(&self) -> impl Fn() + Send + Sync + 'static {
        let stir = Arc::clone(&self.stir);
        move || {
            if !stir.is_stirred.load(Ordering::SeqCst) {
                Python::try_attach(|py| stir.stir(py).map_err(|error| error.write_unraisable(py, None)));
            }
        }
    }

    /// Returns the number of storages.
    pub(super) fn len(&self) -> usize {
        self.lock().storages.len()
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
