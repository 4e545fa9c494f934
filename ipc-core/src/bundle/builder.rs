//! How a bundle is made.

use std::any::Any;
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::binary::encoded_bytes;
use super::descriptor::{BundleDescriptor, Contents, Part};
use super::export::BundleExport;
use super::gather::{Gathered, GatheredPart, gather};
use crate::backend::Access;
use crate::broker::Token;
use crate::descriptor::{DescribedExtent, DescriptorError, ExportId};
use crate::error::{Error, Result};
use crate::export::{NewExport, Published, ShareError, Shared, check_read_only, ready_event};
use crate::interop::{DeviceOwner, Region};
use crate::ipc::Ipc;
use crate::kill::kill_point;
use crate::runtime::Runtime;
use crate::stream::{AsStream, BorrowedStream};
use crate::tensor::{
    LayoutError, MAX_TABLE_BYTES, MAX_TENSORS, Name, NameIndex, NamedTensor, TensorLayout, TensorTable,
    check_name,
};

/// A bundle in the making; see [`Ipc::bundle`].
#[must_use = "nothing is shared before BundleBuilder::start"]
pub struct BundleBuilder<'a> {
    ipc: &'a Ipc,
    draft: Draft,
    ready: Vec<BorrowedStream<'a>>,
}

/// Memory that was put into a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId {
    draft: u64,
    index: usize,
}

/// What was put in so far.
struct Draft {
    /// Tells the memories of one bundle from another's.
    number: u64,
    access: Access,
    memories: Vec<(Region, Box<dyn Any + Send>)>,
    tensors: Vec<NamedTensor>,
    /// The memory that each of them lies in.
    lie_in: Vec<usize>,
    /// Their names.
    names: NameIndex,
}

impl<'a> BundleBuilder<'a> {
    pub(crate) fn new(ipc: &'a Ipc) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let draft = Draft {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            access: Access::ReadWrite,
            memories: Vec::new(),
            tensors: Vec::new(),
            lie_in: Vec::new(),
            names: NameIndex::default(),
        };
        Self { ipc, draft, ready: Vec::new() }
    }

    /// Puts memory in, for tensors to lie in. The owner is kept until the last importer has let go.
    ///
    /// Memory on several devices may be put in, and memory that overlaps or lies in the same allocations: importers open
    /// each allocation once.
    pub fn memory<M, O: DeviceOwner<M>>(&mut self, owner: O) -> MemoryId {
        let region = owner.region();
        self.draft.memories.push((region, Box::new(owner)));
        MemoryId { draft: self.draft.number, index: self.draft.memories.len() - 1 }
    }

    /// Puts a tensor in: its region begins `offset_bytes` behind the start of that memory, and its layout's own offset
    /// counts from there. Tensors may overlap.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] that names the tensor: a name that is empty, longer than 1024 bytes or given twice, or a layout
    /// that does not fit the memory; [`Error::InvalidRegion`] for memory of another bundle, or more tensors than a bundle
    /// has. The tensor is not in the bundle then; the rest stays.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        memory: MemoryId,
        offset_bytes: u64,
        layout: TensorLayout,
    ) -> Result<()> {
        let tensor = NamedTensor { name: Name::Own(name.into()), offset: offset_bytes, layout };
        let known =
            (memory.draft == self.draft.number).then(|| self.draft.memories.get(memory.index)).flatten();
        let (region, _) = known.ok_or_else(|| {
            Error::InvalidRegion(format!("the memory of tensor {:?} belongs to another bundle", tensor.name))
        })?;
        let fits = self.draft.check(&tensor, region);
        fits.and_then(|()| self.draft.add(memory.index, tensor))
    }

    /// Puts memory in that is one tensor: of this layout, or of the owner's element type and one dimension.
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor), and [`LayoutError::NoDtype`] where neither says the element type; in a [`ShareError`]
    /// that gives the owner back.
    pub fn owned<M, O: DeviceOwner<M>>(
        &mut self,
        name: impl Into<String>,
        owner: O,
        layout: Option<TensorLayout>,
    ) -> Result<MemoryId, ShareError<O>> {
        let region = owner.region();
        let tensor = match layout.map_or_else(|| layout_of(&region), Ok) {
            Ok(layout) => NamedTensor { name: Name::Own(name.into()), offset: 0, layout },
            Err(error) => return Err(ShareError::new(error, owner)),
        };
        let fits = self.draft.check(&tensor, &region);
        // In the memory that is put in next.
        match fits.and_then(|()| self.draft.add(self.draft.memories.len(), tensor)) {
            Ok(()) => Ok(self.memory(owner)),
            Err(error) => Err(ShareError::new(error, owner)),
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
    /// [`BundleError`], which holds everything that was put in and the reason: [`Error::InBundle`] with the first tensor in
    /// memory that cannot be shared; a bundle without tensors; two streams of one device. Nothing is shared then.
    pub fn start(self) -> Result<BundleExport, BundleError> {
        match self.prepare() {
            Ok(prepared) => Ok(prepared.finish(self.draft)),
            Err(error) => Err(BundleError { error, draft: Mutex::new(Box::new(self.draft)) }),
        }
    }

    fn prepare(&self) -> Result<Prepared> {
        let runtime = Runtime::get()?;
        let (ipc, draft) = (self.ipc, &self.draft);
        let backend = ipc.backend();
        if draft.tensors.is_empty() {
            return Err(Error::InvalidRegion("a bundle has at least one tensor; put one in first".into()));
        }
        self.check_streams()?;
        let regions: Vec<Region> = draft.memories.iter().map(|(region, _)| *region).collect();
        let gathered = gather(backend, &regions).map_err(|(memory, error)| draft.blame(memory, error))?;
        let mut exports = Vec::with_capacity(gathered.parts.len());
        let mut parts = Vec::with_capacity(gathered.parts.len());
        for (index, part) in gathered.parts.iter().enumerate() {
            let blame = |region, error| draft.blame_part(&gathered, (index, region), error);
            let export = self.prepare_part(part, blame)?;
            parts.push(Part {
                home: ipc.identity_of(part.device)?,
                // Given when it is put into the table; a placeholder that differs from the others'.
                export: ExportId(index as u64),
                token: export.token,
                ready: export.shared.ready.is_some(),
                regions: part
                    .regions
                    .iter()
                    .map(|region| region.iter().map(DescribedExtent::of).collect())
                    .collect(),
            });
            exports.push(export);
        }
        let broker = runtime.poller.listen(ipc.socket_directory())?;
        let regions = draft.regions(&gathered);
        let contents = Contents {
            backend: backend.info().name.to_owned(),
            exporter: runtime.identity,
            broker,
            access: draft.access,
            parts,
            // The draft's, which is given back where anything fails.
            table: TensorTable::default(),
            regions,
        };
        let bytes = encoded_bytes(&contents, &draft.tensors);
        if bytes > MAX_TABLE_BYTES {
            return Err(DescriptorError::TooLarge { found: bytes }.into());
        }
        Ok(Prepared { runtime, contents, exports, gathered })
    }

    /// `blame` says of an error which region it concerns, or that it is all of them.
    fn prepare_part(
        &self,
        part: &GatheredPart,
        blame: impl Fn(Option<usize>, Error) -> Error,
    ) -> Result<NewExport> {
        let runtime = Runtime::get()?;
        let backend = self.ipc.backend();
        let mut allocations = Vec::new();
        for (index, region) in part.regions.iter().enumerate() {
            let before = allocations.len();
            for extent in region {
                let allocation = runtime.exports.allocation(backend, extent);
                allocations.push(allocation.map_err(|error| blame(Some(index), error))?);
            }
            if !self.draft.access.is_writable() {
                let checked = check_read_only(backend.info().name, &allocations[before..]);
                checked.map_err(|error| blame(Some(index), error))?;
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
            token: Token::random()?,
            shared: Shared {
                ready: ready.transpose().map_err(|error| blame(None, error))?.flatten(),
                allocations,
                regions: part.ranges(),
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

impl Draft {
    fn check(&self, tensor: &NamedTensor, region: &Region) -> Result<()> {
        check_name(&tensor.name)?;
        if self.tensors.len() >= MAX_TENSORS {
            return Err(Error::InvalidRegion(format!("a bundle has at most {MAX_TENSORS} tensors")));
        }
        Ok(tensor.check_fits(region.range.len)?)
    }

    /// Adds what has been checked, unless its name is another one's.
    fn add(&mut self, memory: usize, tensor: NamedTensor) -> Result<()> {
        let position = self.tensors.len() as u32;
        self.tensors.push(tensor);
        if self.names.insert(position, |position| &*self.tensors[position as usize].name) {
            self.lie_in.push(memory);
            return Ok(());
        }
        let name = self.tensors.pop().map(|tensor| tensor.name.to_string()).unwrap_or_default();
        Err(DescriptorError::TensorName { name, why: "another tensor of the bundle is called so" }.into())
    }

    /// The region of each tensor, counted through all parts.
    fn regions(&self, gathered: &Gathered) -> Vec<u32> {
        let mut before = Vec::with_capacity(gathered.parts.len());
        let mut regions = 0;
        for part in &gathered.parts {
            before.push(regions);
            regions += part.regions.len();
        }
        let region = |memory: &usize| {
            let place = gathered.places[*memory];
            (before[place.part] + place.region) as u32
        };
        self.lie_in.iter().map(region).collect()
    }

    /// The tensors with their places in the regions.
    fn into_table(mut self, gathered: &Gathered) -> TensorTable {
        for (tensor, memory) in self.tensors.iter_mut().zip(&self.lie_in) {
            // It fits its memory, which fits its region.
            tensor.offset += gathered.places[*memory].offset;
        }
        TensorTable::with_names(self.tensors, self.names)
    }

    /// The same error, about the first tensor in that memory.
    fn blame(&self, memory: usize, error: Error) -> Error {
        self.blame_first(|lies_in| lies_in == memory, error)
    }

    /// The same error, about the first tensor in that region of that part.
    fn blame_part(&self, gathered: &Gathered, (part, region): (usize, Option<usize>), error: Error) -> Error {
        let lies_there = |memory: usize| {
            let place = gathered.places[memory];
            place.part == part && region.is_none_or(|region| place.region == region)
        };
        self.blame_first(lies_there, error)
    }

    /// The same error, about the first tensor in such memory.
    fn blame_first(&self, is_it: impl Fn(usize) -> bool, error: Error) -> Error {
        match self.lie_in.iter().position(|memory| is_it(*memory)) {
            Some(position) => error.of_tensor(&self.tensors[position].name),
            None => error,
        }
    }
}

fn layout_of(region: &Region) -> Result<TensorLayout> {
    let dtype = region.dtype.ok_or(LayoutError::NoDtype)?;
    let element = dtype.bytes().ok_or(LayoutError::UnknownDtype(dtype.code()))?;
    Ok(TensorLayout::contiguous(dtype, [region.range.len / element])?)
}

/// All that can fail has been done.
struct Prepared {
    runtime: &'static Runtime,
    contents: Contents,
    exports: Vec<NewExport>,
    gathered: Gathered,
}

impl Prepared {
    fn finish(mut self, mut draft: Draft) -> BundleExport {
        let mut owners: Vec<Vec<Box<dyn Any + Send>>> = self.exports.iter().map(|_| Vec::new()).collect();
        for ((_, owner), place) in std::mem::take(&mut draft.memories).into_iter().zip(&self.gathered.places)
        {
            owners[place.part].push(owner);
        }
        let table = draft.into_table(&self.gathered);
        let mut published = Vec::with_capacity(owners.len());
        for ((mut export, owners), part) in self.exports.into_iter().zip(owners).zip(&mut self.contents.parts)
        {
            export.shared.owner = Some(Box::new(Mutex::new(owners)));
            part.export = self.runtime.exports.insert(export);
            published.push(Published::new(part.export));
            kill_point!("exporter:published");
        }
        self.contents.table = table;
        tracing::debug!(parts = published.len(), tensors = self.contents.table.len(), "a bundle is shared");
        BundleExport::new(BundleDescriptor::new(self.contents), published)
    }
}

impl fmt::Debug for BundleBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BundleBuilder")
            .field("memories", &self.draft.memories.len())
            .field("tensors", &self.draft.tensors.len())
            .finish_non_exhaustive()
    }
}

/// Why no bundle was shared, and what had been put in.
pub struct BundleError {
    error: Error,
    /// In a mutex so that the error can be sent and shared whatever the owners are.
    draft: Mutex<Box<Draft>>,
}

impl BundleError {
    /// Why.
    pub const fn error(&self) -> &Error {
        &self.error
    }

    /// Gives back the builder with everything that was put in; the streams of
    /// [`ready_on`](BundleBuilder::ready_on) are to be named again.
    pub fn into_builder(self, ipc: &Ipc) -> BundleBuilder<'_> {
        let draft = self.draft.into_inner().unwrap_or_else(PoisonError::into_inner);
        BundleBuilder { ipc, draft: *draft, ready: Vec::new() }
    }
}

impl fmt::Debug for BundleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl fmt::Display for BundleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for BundleError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<BundleError> for Error {
    fn from(failed: BundleError) -> Self {
        failed.error
    }
}
