//! The storages of other processes that this process has received, and the blocks that it has open for them.
//!
//! Nothing here keeps memory open: the storages do, each by its mapping and, in a block, by its claim.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use device_ipc::{Descriptor, DeviceOrdinal, DeviceRange, Error, ErrorKind, Ipc, Mapping};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::claim::{Peer, Releases};
use super::payload::{self, Right};
use super::place::Place;
use super::sweep::Sweep;
use crate::error::{OrRaise as _, StaleError};
use crate::exchange::Exchange;
use crate::mapping_inner::MappingInner;
use crate::session::ipc_in_use;
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor, TensorData, device_name};
use crate::uses::{self, Use};
use crate::{backend, dlpack, wait};

/// A block of another process that this process has open.
struct OpenBlock {
    /// Not the mapping, which would keep the memory open.
    mapping: Weak<MappingInner>,
    range: DeviceRange,
}

/// Memory of another process, in which this process has a storage as long as the mapping exists.
struct ReceivedStorage {
    handle: Py<PyBytes>,
    /// Not the mapping, which would keep the memory open.
    mapping: Weak<MappingInner>,
}

#[derive(Default)]
struct State {
    /// By the address of the memory and that of the mapping, several of which may have the memory open.
    storages: BTreeMap<(u64, usize), ReceivedStorage>,
    storages_sweep: Sweep,
    /// By the descriptor; one for each device on which the block is open.
    blocks: HashMap<Vec<u8>, Vec<OpenBlock>>,
    blocks_sweep: Sweep,
    /// By the number of their tables of claims.
    peers: HashMap<u64, Arc<Peer>>,
}

/// Memory for a storage: its use, which the storage keeps, and its addresses.
type Opened = (Arc<Use>, DeviceRange);

/// The storages that this process has received.
#[derive(Default)]
pub(super) struct ReceivedStorages {
    state: Mutex<State>,
    releases: Releases,
}

impl ReceivedStorages {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the handle of a storage in memory of another process and the right of one payload, which lasts for `lifetime`. `None`
    /// for a storage in memory of this process.
    pub(super) fn share<'py>(
        &self,
        py: Python<'py>,
        place: &Place,
        lifetime: Duration,
    ) -> PyResult<Option<(Py<PyBytes>, Bound<'py, PyBytes>)>> {
        let Some((handle, mapping)) = self.find(py, place) else { return Ok(None) };
        let granted = mapping.read(py, |mapping| py.detach(|| mapping.grant(lifetime)));
        // The last reference ends a lease.
        py.detach(|| drop(mapping));
        let grant = granted?.or_raise(py)?.to_bytes();
        let is_in_block = payload::InBlock::parse(handle.as_bytes(py)).is_some();
        let right = if is_in_block { Right::GrantOfBlock(&grant) } else { Right::Grant(&grant) };
        Ok(Some((handle, right.to_bytes(py))))
    }

    /// Returns the handle of a storage in memory of another process, and the mapping.
    fn find(&self, py: Python<'_>, place: &Place) -> Option<(Py<PyBytes>, Arc<MappingInner>)> {
        let state = self.lock();
        let at_address = state.storages.range((place.ptr, 0)..=(place.ptr, usize::MAX));
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

    /// Claims a storage in a block of another process, which is opened if it is not yet. The payload's right keeps the storage until
    /// then, and is given back afterwards.
    pub(super) fn open_in_block(
        &self,
        py: Python<'_>,
        device: DeviceOrdinal,
        place: &payload::InBlock<'_>,
        nbytes: u64,
    ) -> PyResult<Opened> {
        let (inner, block, peer) = self.open_block(py, device, place)?;
        // The table of a process that has terminated remains mapped here, and offers the storage as before.
        inner.read(py, Mapping::check)?.map_err(|error| refused(py, &error))?;
        let Some(claim) = peer.claim(place.ticket, device) else {
            return Err(stale("its process has released it"));
        };
        let range = block.slice(place.offset, nbytes).ok_or_else(|| outside(nbytes, block.len))?;
        Ok((Use::claimed(&inner, claim), range))
    }

    /// Returns the mapping of a block of another process, and the claims on what that process shares.
    fn open_block(
        &self,
        py: Python<'_>,
        device: DeviceOrdinal,
        place: &payload::InBlock<'_>,
    ) -> PyResult<(Arc<MappingInner>, DeviceRange, Arc<Peer>)> {
        // A process has one table of claims for all its blocks: either of both may be known without the other.
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
        let (inner, range, ipc) = map(py, device, place.descriptor, None)?;
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
        // Another thread may have opened it meanwhile; both mappings have one lease.
        let mut state = self.lock();
        if state.blocks_sweep.is_due(state.blocks.len()) {
            state.blocks.retain(|_, blocks| {
                blocks.retain(|block| block.mapping.strong_count() > 0);
                !blocks.is_empty()
            });
            let left = state.blocks.len();
            state.blocks_sweep.swept(left);
        }
        let opened = OpenBlock { mapping: Arc::downgrade(&inner), range };
        state.blocks.entry(place.descriptor.to_vec()).or_default().push(opened);
        drop(state);
        Ok((inner, range, peer))
    }

    /// Reports that the payload of a ticket was opened. Returns `false` for the table of a process of which this one has no storages.
    pub(super) fn release_payload(&self, table: u64, ticket: u64) -> bool {
        let peer = self.lock().peers.get(&table).cloned();
        peer.inspect(|peer| peer.release_payload(ticket)).is_some()
    }

    /// Returns a storage in memory that was opened. `make` makes one of a tensor, for frameworks without functions for it.
    pub(super) fn make(
        &self,
        py: Python<'_>,
        (used, range): Opened,
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
        self.note(range.ptr.get(), handle, &inner);
        Ok(storage.unbind())
    }

    /// Notes a storage, to find its handle when it is sent on.
    fn note(&self, ptr: u64, handle: &Bound<'_, PyBytes>, mapping: &Arc<MappingInner>) {
        let mapping = Arc::downgrade(mapping);
        let key = (ptr, mapping.as_ptr() as usize);
        let received = ReceivedStorage { handle: handle.clone().unbind(), mapping };
        let mut state = self.lock();
        let mut ended = Vec::new();
        if state.storages_sweep.is_due(state.storages.len()) {
            let is_ended = |one: &&ReceivedStorage| one.mapping.strong_count() == 0;
            let keys: Vec<_> =
                state.storages.iter().filter(|(_, one)| is_ended(one)).map(|(key, _)| *key).collect();
            ended.extend(keys.iter().map(|key| state.storages.remove(key)));
            let left = state.storages.len();
            state.storages_sweep.swept(left);
        }
        ended.push(state.storages.insert(key, received));
        drop(state);
        drop(ended);
    }

    /// Returns the devices of the storages.
    pub(super) fn devices(&self, py: Python<'_>) -> Vec<String> {
        let known: Vec<_> = self.lock().storages.values().map(|one| one.mapping.clone()).collect();
        let mappings: Vec<_> = known.iter().filter_map(Weak::upgrade).collect();
        let devices = mappings.iter().map(|one| device_name(one.backend, one.device.get())).collect();
        py.detach(|| drop(mappings));
        devices
    }
}

/// Opens the memory of an export, by a grant if there is one, which is given back if that fails.
pub(super) fn open_export(
    py: Python<'_>,
    device: DeviceOrdinal,
    descriptor: &[u8],
    grant: Option<&device_ipc::Grant>,
) -> PyResult<Opened> {
    let opened = map(py, device, descriptor, grant);
    let (inner, range, _) = opened.inspect_err(|_| {
        if let Some(grant) = grant {
            grant.give_back();
        }
    })?;
    Ok((Use::only(&inner), range))
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
    let range = mapping.regions().next().unwrap_or(DeviceRange::new(device, device_ipc::DevicePtr::NULL, 0));
    let inner = Arc::new(MappingInner::new(mapping, backend, stream, false));
    uses::note(&inner);
    Ok((inner, range, ipc))
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
