//! The trait of a transfer engine, implemented with an agent of NIXL.

use std::path::Path;
use std::sync::Arc;

use device_ipc_core::backend::engine::{
    MemorySpace, PullRequest, RegisteredMemory, Transfer, TransferEngine, TransferMemory,
};
use device_ipc_core::backend::{BackendInfo, Unavailable};
use device_ipc_core::{Error, Result};

use crate::agent::{Agent, NixlMemory, Pieces, Read, Registration};
use crate::bindings::{MEMORY_DEVICE, MEMORY_HOST};
use crate::library::{NAME, NixlLibrary};
use crate::metadata::RegionMetadata;

/// The backend whose device memory NIXL can transfer.
const CUDA: &str = "cuda";

/// NIXL with its plugin UCX. See the [crate documentation](crate) for its dangers on networks that are not trusted.
///
/// It starts threads and listens on network ports until it and everything that it has returned are dropped.
#[derive(Debug)]
pub struct NixlEngine {
    agent: Arc<Agent>,
    info: BackendInfo,
}

impl NixlEngine {
    /// Loads NIXL from the places in the [crate documentation](crate), and starts it. The first one of a process takes about
    /// 0.5 s.
    ///
    /// # Errors
    ///
    /// [`Unavailable::LibraryNotFound`] with all places; [`Unavailable::TooOld`] with the missing function;
    /// [`Unavailable::Failed`] if the plugin UCX is missing or cannot be started.
    pub fn load() -> Result<Self, Unavailable> {
        Self::start(None)
    }

    /// Loads NIXL from the library at `path`, and starts it.
    ///
    /// # Errors
    ///
    /// As for [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Self, Unavailable> {
        Self::start(Some(path.as_ref()))
    }

    fn start(path: Option<&Path>) -> Result<Self, Unavailable> {
        let agent = Agent::start(NixlLibrary::load(path)?)?;
        let info = BackendInfo::new(NAME, "unknown version", Some(agent.file().to_owned()));
        tracing::debug!(target: crate::LOG, library = agent.file(), "started an agent of NIXL");
        Ok(Self { agent: Arc::new(agent), info })
    }

    /// Returns memory as NIXL names it.
    fn memory(&self, memory: TransferMemory) -> Result<NixlMemory> {
        let TransferMemory { space, address, len } = memory;
        if len == 0 || address.checked_add(len).is_none_or(|end| usize::try_from(end).is_err()) {
            return Err(Error::InvalidRegion(format!(
                "{len} B at {address:#x} cannot be transferred; state at least 1 B of the address space"
            )));
        }
        if !self.supports(space) {
            return Err(Error::Unsupported {
                backend: NAME,
                what: format!("transfer memory of {space:?}"),
                why: "it transfers host memory, and device memory of CUDA where its UCX is built for CUDA"
                    .into(),
            });
        }
        let (memory_type, device) = match space {
            MemorySpace::Device { ordinal, .. } => (MEMORY_DEVICE, u64::from(ordinal.get())),
            _ => (MEMORY_HOST, 0),
        };
        Ok(NixlMemory { memory_type, device, address, len })
    }

    /// Returns the pieces of a request by their addresses.
    fn pieces(&self, request: &PullRequest<'_>, regions: &[RegionMetadata]) -> Result<Pieces> {
        let mut pieces = Pieces::default();
        for piece in request.pieces {
            let region = regions.get(piece.source).ok_or_else(|| {
                Error::InvalidRegion(format!(
                    "a transfer has {} regions, not {}",
                    regions.len(),
                    piece.source
                ))
            })?;
            let address = region.address_of(piece.source_offset, piece.len)?;
            let RegionMetadata { memory_type, device, .. } = *region;
            pieces.sources.push(NixlMemory { memory_type, device, address, len: piece.len });
            pieces.destinations.push(self.memory(request.destination_of(piece)?)?);
        }
        Ok(pieces)
    }
}

impl TransferEngine for NixlEngine {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, space: MemorySpace) -> bool {
        match space {
            MemorySpace::Host => self.agent.supports(true),
            MemorySpace::Device { backend, .. } => backend == CUDA && self.agent.supports(false),
            _ => false,
        }
    }

    unsafe fn register(&self, memory: TransferMemory) -> Result<Box<dyn RegisteredMemory>> {
        // SAFETY: as the caller promised.
        let registration = unsafe { Registration::new(&self.agent, vec![self.memory(memory)?])? };
        let metadata = registration.metadata()?.encode();
        Ok(Box::new(Registered { metadata, _registration: registration }))
    }

    unsafe fn pull(&self, request: &PullRequest<'_>) -> Result<Box<dyn Transfer>> {
        let regions = request.sources.iter().map(|metadata| RegionMetadata::decode(metadata));
        let regions = regions.collect::<Result<Vec<_>>>()?;
        let destinations = request.destinations.iter().map(|memory| self.memory(*memory));
        let destinations = destinations.collect::<Result<Vec<_>>>()?;
        let pieces = self.pieces(request, &regions)?;
        check_one_type("source", &pieces.sources)?;
        check_one_type("destination", &destinations)?;
        // SAFETY: as the caller promised.
        let read = unsafe { Read::start(&self.agent, &regions, destinations, pieces)? };
        Ok(Box::new(Pulling(read)))
    }
}

/// Checks that there are memories, all of one type, as a list of NIXL requires.
fn check_one_type(what: &str, memories: &[NixlMemory]) -> Result<()> {
    let Some(first) = memories.first() else {
        return Err(Error::InvalidRegion(format!("a transfer needs at least one {what}")));
    };
    if memories.iter().all(|memory| memory.memory_type == first.memory_type) {
        return Ok(());
    }
    Err(Error::InvalidRegion(format!(
        "the {what}s of a transfer are of two types; use one transfer for each"
    )))
}

#[derive(Debug)]
struct Registered {
    metadata: Vec<u8>,
    _registration: Registration,
}

impl RegisteredMemory for Registered {
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }
}

#[derive(Debug)]
struct Pulling(Read);

impl Transfer for Pulling {
    fn is_finished(&self) -> Result<bool> {
        self.0.is_finished()
    }

    fn cancel_rest(&self) {
        self.0.cancel_rest();
    }

    fn arrived_bytes(&self) -> u64 {
        self.0.arrived_bytes()
    }
}
