//! The steps that the export of one region and that of named tensors have in common: the parts, and their publication.

use std::any::Any;
use std::sync::Arc;

use super::BorrowedMemory;
use super::guard::{Export, Published, Reach};
use super::share::ShareBuilder;
use super::shared::{Allocation, Handles, ReadyEvent, Shared};
use super::table::NewExport;
use crate::backend::check_backend;
use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Remedy, Result};
use crate::model::one_or_many::OneOrMany;
use crate::os::kill::kill_point;
use crate::sharing::{Ipc, Runtime};
use crate::wire::descriptor::{BackendName, Contents, Descriptor, ExportId, Memory, Part, PartRegions};

/// The memory of an export on one device.
pub(super) struct PartMemory {
    pub(super) device: DeviceOrdinal,
    /// The size of the shared memory in bytes.
    pub(super) bytes: u64,
    pub(super) allocations: Handles,
    /// The regions in the address space of this process.
    pub(super) ranges: Arc<[DeviceRange]>,
    /// The regions in the form of a descriptor.
    pub(super) described: PartRegions,
    pub(super) borrowed: Option<BorrowedMemory>,
}

/// The parts of a descriptor, with the entry of the table for each.
pub(super) struct DescribedParts {
    described: OneOrMany<Part>,
    exports: OneOrMany<NewExport>,
}

/// An export before it is published: nothing can fail after this.
pub(super) struct Prepared {
    pub(super) runtime: &'static Runtime,
    pub(super) contents: Contents,
    pub(super) exports: OneOrMany<NewExport>,
    pub(super) reach: Reach,
}

impl DescribedParts {
    pub(super) const NONE: Self = Self { described: OneOrMany::NONE, exports: OneOrMany::NONE };
}

impl<O: Send + 'static> ShareBuilder<'_, O> {
    /// Adds the memory on a further device.
    pub(super) fn add_part(
        &self,
        runtime: &Runtime,
        parts: &mut DescribedParts,
        memory: PartMemory,
    ) -> Result<()> {
        let PartMemory { device, bytes, allocations, ranges, described, borrowed } = memory;
        kill_point!("exporter:exported");
        let ready = self.ready_stream(device).map(|stream| ready_event(self.ipc, stream));
        let ready = ready.transpose()?.flatten();
        let token = runtime.exports.new_token()?;
        parts.described.push(Part {
            home: self.ipc.identity_of(device)?,
            // The table assigns the number; the placeholders of the parts differ.
            export: ExportId(parts.described.len() as u64),
            token,
            ready: ready.is_some(),
            regions: described,
        });
        parts.exports.push(NewExport {
            borrowed,
            backend: self.ipc.backend().info().name,
            bytes,
            access: self.access,
            allow: self.ipc.allow_list().clone(),
            ahead: self.ahead,
            claims: self.claims.clone(),
            token,
            shared: Shared {
                ready,
                allocations,
                regions: ranges,
                remote: self.ipc.remote_memory(),
                owner: None,
                keeps: false,
            },
        });
        Ok(())
    }

    pub(super) fn prepared(
        &self,
        runtime: &'static Runtime,
        parts: DescribedParts,
        memory: Memory,
        reach: Reach,
    ) -> Result<Prepared> {
        let contents = Contents {
            backend: BackendName::new(self.ipc.backend().info().name)?,
            exporter: runtime.identity,
            broker: runtime.poller.listen(self.ipc.socket_directory())?,
            access: self.access,
            parts: parts.described,
            memory,
            ring: None,
            network: self.ipc.network_addresses(),
        };
        Ok(Prepared { runtime, contents, exports: parts.exports, reach })
    }
}

impl Prepared {
    /// Publishes each part with the owner of its memory.
    pub(super) fn publish(
        mut self,
        mut owner_on: impl FnMut(DeviceOrdinal) -> Box<dyn Any + Send + Sync>,
    ) -> Export {
        let mut published = OneOrMany::NONE;
        let mut parts = self.contents.parts.iter_mut();
        self.exports.for_each(|mut export| {
            let (device, bytes) = (export.shared.regions[0].device, export.bytes);
            export.shared.owner = Some(owner_on(device));
            let export = self.runtime.exports.insert(export);
            if let Some(part) = parts.next() {
                part.export = export;
            }
            published.push(Published::new(export, self.runtime));
            kill_point!("exporter:published");
            tracing::debug!(target: crate::os::log::EXPORT, %export, bytes, "shared");
        });
        Export::new(Descriptor::new(self.contents), published, self.reach)
    }

    /// Publishes the only part with the owner of its memory.
    pub(super) fn publish_one(self, owner: impl Any + Send + Sync) -> Export {
        let mut owner = Some(Box::new(owner));
        self.publish(|_| owner.take().expect("memory of one device has one part"))
    }
}

/// Returns the event that importers wait for; `None` if the stream has no work, or if the host has waited for it.
pub(crate) fn ready_event(ipc: &Ipc, stream: BorrowedStream<'_>) -> Result<Option<ReadyEvent>> {
    let backend = ipc.backend();
    check_backend("the stream", stream.backend(), backend.info().name)?;
    if backend.memory().is_complete(stream)? {
        return Ok(None);
    }
    if !backend.capabilities(stream.device())?.ipc_events {
        backend.memory().synchronize(stream)?;
        return Ok(None);
    }
    let event = backend.create_event(stream.device())?;
    event.record(stream)?;
    let handle = event.export()?;
    Ok(Some(ReadyEvent { event, handle }))
}

/// Checks that the hardware enforces read-only access.
pub(crate) fn check_read_only(backend: &'static str, allocations: &[Arc<Allocation>]) -> Result<()> {
    let writable = allocations.iter().map(|allocation| allocation.kind()).find(|kind| !kind.read_only);
    let Some(kind) = writable else { return Ok(()) };
    Err(Error::Unsupported {
        backend,
        what: "share this memory read-only".into(),
        why: format!(
            "a handle of its kind ({}) opens it for writing too; share it read-write, allocate it as a kind that can be \
             read-only ({}), or share a copy",
            kind.name,
            Remedy::AllocateReadOnly
        ),
    })
}
