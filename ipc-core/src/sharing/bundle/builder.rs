//! How a bundle is made.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use super::draft::{Draft, Made};
use super::export::BundleExport;
use super::gather::{Gathered, GatheredPart, gather};
use crate::backend::Buffer;
use crate::backend::interop::{DeviceOwner, Region};
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{Access, DeviceBound};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::model::tensor::{LayoutError, MAX_TABLE_BYTES, NamedTensor, TensorLayout};
use crate::os::kill::kill_point;
use crate::sharing::export::{
    Handles, NewExport, Published, Shared, check_backend, check_read_only, ready_event, stand_in,
};
use crate::sharing::{ErrorWith, Runtime, Session};
use crate::wire::BrokerAddress;
use crate::wire::bundle::encoded_bytes;
use crate::wire::bundle::{BundleDescriptor, Contents, Part};
use crate::wire::descriptor::{DescriptorError, ExportId};

/// A bundle in the making; see [`Ipc::bundle`](crate::Ipc::bundle).
#[must_use = "nothing is shared before BundleBuilder::start"]
pub struct BundleBuilder<'a> {
    ipc: &'a Session,
    draft: Draft,
    ready: Vec<BorrowedStream<'a>>,
}

/// Memory that was put into a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId {
    pub(super) draft: u64,
    pub(super) index: usize,
}

impl<'a> BundleBuilder<'a> {
    pub(crate) fn new(ipc: &'a Session) -> Self {
        Self { ipc, draft: Draft::new(ipc.backend()), ready: Vec::new() }
    }

    /// Continues with what was put in before.
    pub(crate) const fn with_draft(ipc: &'a Session, draft: Draft) -> Self {
        Self { ipc, draft, ready: Vec::new() }
    }

    /// Puts memory in, for tensors to lie in. The owner is kept until the last importer has let go.
    ///
    /// Memory on several devices may be put in, and memory that overlaps or lies in the same allocations: importers open
    /// each allocation once.
    pub fn memory<M, O: DeviceOwner<M>>(&mut self, owner: O) -> MemoryId {
        let region = owner.region();
        self.draft.add_memory(region, owner)
    }

    /// Puts a tensor in: its region begins `offset_bytes` behind the start of that memory, and its layout's own offset
    /// counts from there. Tensors may overlap.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] that names the tensor: a name that is empty, longer than 1024 bytes or given twice, or a layout
    /// that does not fit the memory, or a first element at no multiple of the element size; [`Error::InvalidRegion`] for memory of another bundle, or more tensors than a bundle
    /// has. The tensor is not in the bundle then; the rest stays.
    pub fn tensor(
        &mut self,
        name: impl AsRef<str>,
        memory: MemoryId,
        offset_bytes: u64,
        layout: TensorLayout,
    ) -> Result<()> {
        self.draft.add_in(memory, NamedTensor { name: name.as_ref(), offset: offset_bytes, layout: &layout })
    }

    /// Puts memory in that is one tensor: of this layout, or of the owner's element type and one dimension.
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor), and [`LayoutError::NoDtype`] where neither says the element type; in a [`ErrorWith`]
    /// that gives the owner back.
    pub fn owned<M, O: DeviceOwner<M>>(
        &mut self,
        name: impl AsRef<str>,
        owner: O,
        layout: Option<TensorLayout>,
    ) -> Result<MemoryId, ErrorWith<O>> {
        let region = owner.region();
        let layout = layout.map_or_else(|| layout_of(&region), Ok);
        let added = layout.and_then(|layout| {
            let tensor = NamedTensor { name: name.as_ref(), offset: 0, layout: &layout };
            self.draft.add_in_next(&region, tensor)
        });
        match added {
            Ok(()) => Ok(self.memory(owner)),
            Err(error) => {
                let owner = DeviceBound::of_region(self.ipc.backend(), &region, owner);
                Err(ErrorWith::bound(error, owner))
            }
        }
    }

    /// What importers may do with all of it; see [`ShareBuilder::access`](crate::ShareBuilder::access).
    pub const fn access(mut self, access: Access) -> Self {
        self.draft.access = access;
        self
    }

    /// The bytes are written by what has been submitted to this stream before [`start`](Self::start): importers wait for
    /// it, on their stream where they name one.
    ///
    /// May be called once for each device whose memory is written by a stream of its own: what lies on a device is ready
    /// when the stream of that device gets here, and where none of it was named, the first stream that was.
    pub fn ready_on<M>(mut self, stream: &'a impl AsStream<M>) -> Self {
        self.ready.push(stream.as_stream());
        self
    }

    /// Makes the exports, one for each device.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which holds everything that was put in and the reason: [`Error::InBundle`] with the first tensor in
    /// memory that cannot be shared; a bundle without tensors; two streams of one device. Nothing is shared then.
    pub fn start(self) -> Result<BundleExport, ErrorWith<Draft>> {
        match self.prepare() {
            Ok(prepared) => Ok(prepared.finish(self.draft)),
            Err(error) => Err(ErrorWith::new(error, self.draft)),
        }
    }

    fn prepare(&self) -> Result<Prepared> {
        let runtime = Runtime::get()?;
        let (ipc, draft) = (self.ipc, &self.draft);
        let backend = ipc.backend();
        if draft.tensors() == 0 {
            return Err(Error::InvalidRegion("a bundle has at least one tensor; put one in first".into()));
        }
        self.check_streams()?;
        let (memories, stand_ins) = self.memories()?;
        let (gathered, handles) = self.gather(&memories, stand_ins.is_empty())?;
        let mut exports = Vec::with_capacity(gathered.parts.len());
        let mut parts = Vec::with_capacity(gathered.parts.len());
        for (index, (part, allocations)) in gathered.parts.iter().zip(handles).enumerate() {
            let blame = |region, error| draft.blame_part(&gathered, (index, region), error);
            let export = self.prepare_part(part, allocations, blame)?;
            parts.push(Part {
                home: ipc.identity_of(part.device)?,
                // Given when it is put into the table; a placeholder that differs from the others'.
                export: ExportId(index as u64),
                token: export.token,
                ready: export.shared.ready.is_some(),
                regions: Arc::clone(&part.described),
            });
            exports.push(export);
        }
        let described = Described {
            backend: backend.info().name.to_owned(),
            broker: runtime.poller.listen(ipc.socket_directory())?,
            parts,
        };
        let bytes =
            encoded_bytes(&described.backend, &described.broker, &described.parts, draft.encoded_bytes());
        if bytes > MAX_TABLE_BYTES {
            return Err(DescriptorError::TooLarge { found: bytes }.into());
        }
        Ok(Prepared { runtime, described, exports, gathered, stand_ins })
    }

    /// The memory that was put in. Memory without bytes has a byte that stands in for it: of other memory on its device, or of
    /// an allocation that is made for this bundle.
    fn memories(&self) -> Result<(Cow<'_, [Region]>, Vec<Buffer>)> {
        let given = &self.draft.memories;
        let has_bytes = |memory: &&Region| memory.range.len > 0;
        if given.iter().all(|memory| has_bytes(&memory)) {
            return Ok((Cow::Borrowed(given), Vec::new()));
        }
        let mut stand_ins: Vec<Buffer> = Vec::new();
        let mut memories = given.clone();
        for memory in memories.iter_mut().filter(|memory| memory.range.len == 0) {
            check_backend("the memory", memory.backend, self.ipc.backend().info().name)?;
            let device = memory.range.device;
            let others = given.iter().filter(has_bytes).copied();
            let other =
                others.chain(stand_ins.iter().map(DeviceOwner::region)).find(|o| o.range.device == device);
            let whole = match other {
                Some(other) => other,
                None => {
                    let made = stand_in(self.ipc, device, self.draft.access, false)?;
                    stand_ins.push(made);
                    stand_ins[stand_ins.len() - 1].region()
                }
            };
            *memory = Region { range: DeviceRange { len: 1, ..whole.range }, ..whole };
        }
        Ok((Cow::Owned(memories), stand_ins))
    }

    /// Where the memory lies, and the handles of each part's allocations: those of an earlier bundle of the same memory, where
    /// one `may_be_known`, or found anew.
    fn gather(&self, memories: &[Region], may_be_known: bool) -> Result<(Arc<Gathered>, Vec<Handles>)> {
        let (backend, draft) = (self.ipc.backend(), &self.draft);
        if may_be_known && let Some(known) = Made::of_the_same(backend, &draft.memories) {
            return Ok(known);
        }
        let gathered = gather(backend, memories);
        let (gathered, handles) = gathered.map_err(|(memory, error)| draft.blame(memory, error))?;
        Ok((Arc::new(gathered), handles))
    }

    /// `blame` says of an error which region it concerns, or that it is all of them.
    fn prepare_part(
        &self,
        part: &GatheredPart,
        allocations: Handles,
        blame: impl Fn(Option<usize>, Error) -> Error,
    ) -> Result<NewExport> {
        let backend = self.ipc.backend();
        if !self.draft.access.is_writable() {
            let each = allocations.iter().enumerate();
            let mut checked = each
                .map(|(index, one)| (index, check_read_only(backend.info().name, std::slice::from_ref(one))));
            let refused = checked.find_map(|(index, checked)| Some((index, checked.err()?)));
            if let Some((allocation, error)) = refused {
                return Err(blame(Some(part.region_of(allocation)), error));
            }
        }
        kill_point!("exporter:exported");
        let of_the_device = self.ready.iter().find(|stream| stream.device() == part.device);
        let ready = of_the_device.or(self.ready.first()).map(|stream| ready_event(self.ipc, *stream));
        Ok(NewExport {
            borrowed: None,
            backend: backend.info().name,
            bytes: part.bytes,
            access: self.draft.access,
            allow: self.ipc.allow_list().clone(),
            token: Runtime::get()?.exports.new_token()?,
            shared: Shared {
                ready: ready.transpose().map_err(|error| blame(None, error))?.flatten(),
                allocations,
                regions: Arc::clone(&part.ranges),
                owner: None,
                keeps: false,
            },
        })
    }

    fn check_streams(&self) -> Result<()> {
        let mut devices = HashSet::new();
        match self.ready.iter().find(|stream| !devices.insert(stream.device())) {
            None => Ok(()),
            Some(again) => Err(Error::Unsupported {
                backend: self.ipc.backend().info().name,
                what: format!("have a bundle ready on two streams of device {}", again.device()),
                why: "each device has one; make that one wait for the other first".into(),
            }),
        }
    }
}

fn layout_of(region: &Region) -> Result<TensorLayout> {
    let dtype = region.dtype.ok_or(LayoutError::NoDtype)?;
    let element = dtype.bytes().ok_or(LayoutError::UnknownDtype(dtype.code()))?;
    Ok(TensorLayout::contiguous(dtype, [region.range.len / element])?)
}

/// What a descriptor says beside the tensors.
struct Described {
    backend: String,
    broker: BrokerAddress,
    parts: Vec<Part>,
}

/// All that can fail has been done.
struct Prepared {
    runtime: &'static Runtime,
    described: Described,
    exports: Vec<NewExport>,
    gathered: Arc<Gathered>,
    /// Memory of this bundle alone.
    stand_ins: Vec<Buffer>,
}

impl Prepared {
    fn finish(mut self, mut draft: Draft) -> BundleExport {
        let may_be_known = self.stand_ins.is_empty();
        for stand_in in self.stand_ins {
            let region = stand_in.region();
            draft.owners.add(&region, stand_in);
        }
        let (mut published, mut allocations) =
            (Vec::with_capacity(self.exports.len()), Vec::with_capacity(self.exports.len()));
        let parts = &mut self.described.parts;
        let places = self.exports.into_iter().zip(&self.gathered.parts);
        for ((mut export, place), part) in places.zip(parts) {
            allocations.push(Arc::clone(&export.shared.allocations));
            export.shared.owner = Some(Box::new(Mutex::new(draft.owners.take(place.device))));
            part.export = self.runtime.exports.insert(export);
            published.push(Published::new(part.export));
            kill_point!("exporter:published");
        }
        let access = draft.access;
        let tensors = draft.into_tensors(self.gathered, &allocations, may_be_known);
        tracing::debug!(parts = published.len(), tensors = tensors.table().len(), "a bundle is shared");
        let Described { backend, broker, parts } = self.described;
        let exporter = self.runtime.identity;
        let contents = Contents { backend, exporter, broker, access, parts, tensors };
        BundleExport::new(BundleDescriptor::new(contents), published)
    }
}

impl fmt::Debug for BundleBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BundleBuilder")
            .field("memories", &self.draft.memories.len())
            .field("tensors", &self.draft.tensors())
            .finish_non_exhaustive()
    }
}
