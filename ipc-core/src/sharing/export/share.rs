//! The builder of an export.

#![allow(unsafe_code, reason = "copies memory while its owner and the new buffer keep both ranges")]

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use super::exposure::{Exposure, ExposurePolicy};
use super::guard::{Export, Published, Reach};
use super::shared::{Allocation, Handles, ReadyEvent, Shared};
use super::table::NewExport;
use super::{BorrowedMemory, BorrowedPiece};
use crate::backend::Buffer;
use crate::backend::check_backend;
use crate::backend::interop::{DeviceOwner, Region};
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{Access, DeviceBound, DeviceIpc, MemoryUse, with_device_context};
use crate::model::address::{DevicePtr, DeviceRange, Extent};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Remedy, Result};
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::{Dtype, LayoutError, TensorLayout, check_alignment};
use crate::os::kill::kill_point;
use crate::sharing::{ErrorWith, Runtime, Session};
use crate::wire::descriptor::{
    BackendName, Contents, DescribedExtent, DescribedRegion, Descriptor, ExportId, MAX_EXTENTS, Memory, Part,
    PartRegions,
};

/// An export in the making; see [`Ipc::share`](crate::Ipc::share).
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// use device_ipc_core::Dtype;
/// let stream = ipc.create_stream(0)?;
/// let buffer = ipc.allocate(0, 80)?;
/// buffer.view_mut::<u8, _>(&stream)?.fill_bytes(0)?;
/// let export = ipc.share(buffer).dtype(Dtype::F32).shape([4, 5]).ready_on(&stream).start()?;
/// assert_eq!(export.descriptor().layout().expect("it was stated").shape(), [4, 5]);
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is shared before ShareBuilder::start"]
pub struct ShareBuilder<'a, O> {
    pub(super) session: &'a Session,
    pub(super) owner: DeviceBound<O>,
    /// The region; empty for named tensors.
    region: Region,
    start: fn(Self) -> Result<Export, ErrorWith<O>>,
    dtype: Option<Dtype>,
    shape: Option<Vec<u64>>,
    strides: Option<Vec<u64>>,
    offset: u64,
    pub(super) access: Access,
    /// At most one stream for each device.
    pub(super) ready: OneOrMany<BorrowedStream<'a>>,
    borrowed: bool,
    pub(super) ahead: bool,
    pub(super) exposing: ExposurePolicy,
}

impl<'a, O: Send + 'static> ShareBuilder<'a, O> {
    pub(crate) fn new(session: &'a Session, owner: O, region: Region) -> Self {
        let owner = DeviceBound::of_region(session.backend(), &region, owner);
        let dtype = region.dtype;
        Self { dtype, ..Self::with(session, owner, region, Self::start_region) }
    }

    /// Creates the builder for an owner of several memories.
    pub(super) fn unplaced(
        session: &'a Session,
        owner: O,
        start: fn(Self) -> Result<Export, ErrorWith<O>>,
    ) -> Self {
        let range = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::NULL, 0);
        let region = Region { backend: session.backend().info().name, range, allocation: None, dtype: None };
        Self::with(session, DeviceBound::unbound(owner), region, start)
    }

    fn with(
        session: &'a Session,
        owner: DeviceBound<O>,
        region: Region,
        start: fn(Self) -> Result<Export, ErrorWith<O>>,
    ) -> Self {
        Self {
            session,
            owner,
            region,
            start,
            dtype: None,
            shape: None,
            strides: None,
            offset: 0,
            access: Access::ReadWrite,
            ready: OneOrMany::NONE,
            borrowed: false,
            ahead: false,
            exposing: ExposurePolicy::Allow,
        }
    }

    /// Returns whether a layout was stated.
    pub(super) const fn states_layout(&self) -> bool {
        self.dtype.is_some() || self.shape.is_some() || self.strides.is_some() || self.offset != 0
    }

    /// Returns the stream that writes the memory on this device.
    pub(super) fn ready_stream(&self, device: DeviceOrdinal) -> Option<BorrowedStream<'a>> {
        let of_the_device = self.ready.iter().find(|stream| stream.device() == device);
        of_the_device.or(self.ready.first()).copied()
    }

    /// Shares memory that the owner does not keep allocated.
    pub(crate) const fn borrowed(mut self) -> Self {
        self.borrowed = true;
        self
    }

    /// Sets the shape of the tensor in elements; row-major unless [`strides`](Self::strides) are set.
    pub fn shape(mut self, shape: impl Into<Vec<u64>>) -> Self {
        self.shape = Some(shape.into());
        self
    }

    /// Sets the stride of each dimension in elements.
    pub fn strides(mut self, strides: impl Into<Vec<u64>>) -> Self {
        self.strides = Some(strides.into());
        self
    }

    /// Sets the offset of the tensor's first element from the start of the region in elements, by default 0.
    pub const fn element_offset(mut self, elements: u64) -> Self {
        self.offset = elements;
        self
    }

    /// Sets the element type, by default that of the owner if it has one. Without a [`shape`](Self::shape) the tensor has one
    /// dimension and takes all bytes of the region from its offset on, which must be a whole number of elements
    /// ([`LayoutError::NotWholeElements`]).
    pub const fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Sets the access of importers, by default read-write. The hardware enforces read-only access; [`start`](Self::start)
    /// fails for kinds of handles that cannot be mapped read-only.
    ///
    /// A kernel that writes to a read-only mapping does not change the bytes, and ends the importer's use of the device. On a device
    /// without [`fault_isolation`](crate::backend::Capabilities::fault_isolation), such as a CUDA device that is used through MPS, it
    /// ends the use of the device in other processes too, also in the exporter.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Sets the policy for regions whose importers could access more than the region: the rest of its allocation, or other
    /// allocations in the same pages. By default the region is shared.
    pub const fn exposure(mut self, exposing: ExposurePolicy) -> Self {
        self.exposing = exposing;
        self
    }

    /// Permits leases ahead: an importer that opens one export with this setting by a
    /// [grant](Export::grant) receives, in the same reply, idle leases on the next exports with this setting that lie in the same
    /// allocation. It opens those without a message then. For many exports of one allocation, each with a lifetime of its own.
    ///
    /// Such an importer reaches no more memory than before, because a handle is of the whole allocation. Its first open of such an
    /// export does not count for [`wait_opened`](Export::wait_opened) and [`wait_released`](Export::wait_released).
    pub const fn lease_ahead(mut self) -> Self {
        self.ahead = true;
        self
    }

    /// Makes importers wait until the stream has completed the work that was submitted to it before [`start`](Self::start),
    /// which writes the bytes. They wait on a stream if they open the memory on one.
    ///
    /// May be called once for each device with a stream of its own: memory is ready when the stream of its device reaches this
    /// point, or the first stream if there is none for its device. A later stream of the same device replaces the earlier one.
    ///
    /// If the device has no events that processes share, `start` waits for the stream on the host.
    pub fn ready_on<M>(mut self, stream: &'a impl AsStream<M>) -> Self {
        let stream = stream.as_stream();
        match self.ready.iter_mut().find(|known| known.device() == stream.device()) {
            Some(known) => *known = stream,
            None => self.ready.push(stream),
        }
        self
    }

    /// Shares the memory.
    ///
    /// A tensor without elements needs no memory: if its owner has no bytes, the export contains one byte of the library.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which contains the owner and the reason: memory that cannot be shared ([`Error::NotShareable`], with the
    /// remedy), a layout that does not fit, a region that does not begin at a multiple of the element size
    /// ([`LayoutError::Unaligned`]), memory that was opened from another process ([`Error::SharedOn`]), or the vendor's error.
    pub fn start(self) -> Result<Export, ErrorWith<O>> {
        (self.start)(self)
    }

    fn start_region(self) -> Result<Export, ErrorWith<O>> {
        if self.region.range.len == 0 {
            return self.start_without_bytes();
        }
        match self.prepare(self.region) {
            Ok(prepared) => prepared.finish(Box::new(Mutex::new(self.owner))),
            Err(Error::Exposes { .. }) if self.exposing == ExposurePolicy::Copy => {
                match self.prepare_copy() {
                    Ok((prepared, copy)) => {
                        // The copy replaces the original.
                        drop(self.owner);
                        prepared.finish(Box::new(copy))
                    }
                    Err(error) => Err(ErrorWith::bound(error, self.owner)),
                }
            }
            Err(error) => Err(ErrorWith::bound(error, self.owner)),
        }
    }

    fn start_without_bytes(mut self) -> Result<Export, ErrorWith<O>> {
        // The shared byte belongs to the library.
        self.borrowed = false;
        match self.prepare_without_bytes() {
            Ok((prepared, stand_in)) => prepared.finish(Box::new((Mutex::new(self.owner), stand_in))),
            Err(error) => Err(ErrorWith::bound(error, self.owner)),
        }
    }

    fn prepare_without_bytes(&self) -> Result<(Prepared, Buffer)> {
        check_backend("the memory", self.region.backend, self.session.backend().info().name)?;
        if self.layout()?.is_none() {
            return Err(no_bytes());
        }
        let alone = self.exposing != ExposurePolicy::Allow;
        let stand_in = stand_in(self.session, self.region.range.device, self.access, alone)?;
        Ok((self.prepare(stand_in.region())?, stand_in))
    }

    /// Returns the error of an export that cannot be made.
    pub(crate) fn refuse(self, error: Error) -> ErrorWith<O> {
        ErrorWith::bound(error, self.owner)
    }

    /// Prepares the export of an isolated copy.
    fn prepare_copy(&self) -> Result<(Prepared, Buffer)> {
        let copy = isolated_copy(self.session, self.region, self.ready_stream(self.region.range.device))?;
        let region = Region { range: copy.range(), allocation: Some(copy.range()), ..self.region };
        Ok((self.prepare(region)?, copy))
    }

    fn prepare(&self, region: Region) -> Result<Prepared> {
        let runtime = Runtime::get()?;
        let backend = self.session.backend();
        let name = backend.info().name;
        let range = region.range;
        check_region(name, &region)?;
        let layout = self.layout()?;
        let kept = if self.borrowed { None } else { kept_extent(runtime, backend, &region) };
        let (extents, allocations) = match kept {
            Some(extent) => with_allocations(runtime, backend, vec![extent])?,
            None => asked_for(runtime, backend, &region)?,
        };
        let offset = offset_in(range, &extents)?;
        kill_point!("exporter:exported");
        if !self.access.is_writable() {
            check_read_only(name, &allocations)?;
        }
        let exposure = Exposure::of(&region, &allocations);
        if self.exposing != ExposurePolicy::Allow {
            exposure.check_exact()?;
        }
        let ready = self.ready_stream(range.device).map(|stream| ready_event(self.session, stream));
        let ready = ready.transpose()?.flatten();
        let broker = runtime.poller.listen(self.session.socket_directory())?;
        let token = runtime.exports.new_token()?;
        if extents.len() > MAX_EXTENTS {
            return Err(Error::InvalidRegion(format!(
                "it lies in {} allocations, at most {MAX_EXTENTS}",
                extents.len()
            )));
        }
        let part = Part {
            home: self.session.identity_of(range.device)?,
            export: ExportId(0),
            token,
            ready: ready.is_some(),
            regions: PartRegions::One(extents.iter().map(DescribedExtent::of).collect()),
        };
        let contents = Contents {
            backend: BackendName::new(name)?,
            exporter: runtime.identity,
            broker,
            access: self.access,
            parts: OneOrMany::One(part),
            memory: Memory::Region(DescribedRegion { offset, len: range.len, layout }),
            ring: None,
            network: self.session.network_addresses(),
        };
        let borrowed = self.borrowed.then(|| {
            let piece = BorrowedPiece { range, allocation: region.allocation, extents };
            BorrowedMemory::new(backend, [piece])
        });
        let export = NewExport {
            borrowed,
            backend: name,
            bytes: range.len,
            access: self.access,
            allow: self.session.allow_list().clone(),
            ahead: self.ahead,
            token,
            shared: Shared {
                ready,
                allocations,
                regions: [range].into(),
                remote: self.session.remote_memory(),
                owner: None,
                keeps: false,
            },
        };
        Ok(Prepared { runtime, contents, export, exposure })
    }

    fn layout(&self) -> Result<Option<TensorLayout>> {
        let layout = match (self.dtype, &self.shape, &self.strides) {
            (Some(dtype), Some(shape), Some(strides)) => {
                TensorLayout::strided(dtype, shape.as_slice(), strides.as_slice())?
            }
            (Some(dtype), Some(shape), None) => TensorLayout::contiguous(dtype, shape.as_slice())?,
            (Some(dtype), None, None) => TensorLayout::to_end(dtype, self.offset, self.region.range.len)?,
            (_, None, Some(strides)) => {
                return Err(LayoutError::Strides { dimensions: 0, strides: strides.len() }.into());
            }
            (None, Some(_), _) => return Err(LayoutError::NoDtype.into()),
            (None, None, None) if self.offset != 0 => return Err(LayoutError::NoDtype.into()),
            (None, None, None) => return Ok(None),
        };
        let layout = layout.with_element_offset(self.offset)?;
        layout.check_fits(self.region.range.len)?;
        if self.region.range.len > 0 {
            check_alignment(layout.dtype(), self.region.range.ptr.get())?;
        }
        Ok(Some(layout))
    }
}

impl<O> fmt::Debug for ShareBuilder<'_, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShareBuilder").field("region", &self.region).finish_non_exhaustive()
    }
}

/// A prepared export: nothing can fail after this.
struct Prepared {
    runtime: &'static Runtime,
    contents: Contents,
    export: NewExport,
    exposure: Exposure,
}

impl Prepared {
    fn finish<O>(mut self, owner: Box<dyn Any + Send + Sync>) -> Result<Export, ErrorWith<O>> {
        self.export.shared.owner = Some(owner);
        let bytes = self.export.bytes;
        let export = self.runtime.exports.insert(self.export);
        self.contents.parts[0].export = export;
        kill_point!("exporter:published");
        tracing::debug!(target: crate::os::log::EXPORT, %export, bytes, "shared");
        let published = OneOrMany::One(Published::new(export, self.runtime));
        Ok(Export::new(Descriptor::new(self.contents), published, Reach::Known(self.exposure)))
    }
}

fn no_bytes() -> Error {
    Error::InvalidRegion(
        "it has no bytes; share at least one, or state the element type and shape of a tensor without elements".into(),
    )
}

/// Returns one byte that represents the memory of a tensor without elements, of a kind that permits this access. `alone`
/// requests an isolated kind, if there is one.
pub(crate) fn stand_in(
    session: &Session,
    device: DeviceOrdinal,
    access: Access,
    alone: bool,
) -> Result<Buffer> {
    let with_access =
        if access.is_writable() { MemoryUse::new() } else { MemoryUse::new().read_only_importers() };
    let wanted = if alone { with_access.isolated() } else { with_access };
    match Buffer::allocate(Arc::clone(session.backend()), device, 1, wanted) {
        // The share reports the limits of this memory.
        Err(Error::Unsupported { .. }) => {
            Buffer::allocate(Arc::clone(session.backend()), device, 1, MemoryUse::new())
        }
        allocated => allocated,
    }
}

/// Checks the region before the driver is called.
pub(crate) fn check_region(backend: &str, region: &Region) -> Result<()> {
    let range = region.range;
    check_backend("the memory", region.backend, backend)?;
    if range.ptr.is_null() {
        return Err(Error::NotDeviceMemory { ptr: range.ptr, why: "it is the null address".into() });
    }
    if range.len == 0 {
        return Err(no_bytes());
    }
    if range.end().is_none() {
        return Err(Error::InvalidRegion(format!(
            "{} bytes at {} leave the address space",
            range.len, range.ptr
        )));
    }
    Ok(())
}

/// Returns the allocation of the region, if an export keeps it.
fn kept_extent(runtime: &Runtime, backend: &Arc<dyn DeviceIpc>, region: &Region) -> Option<Extent> {
    let kept = runtime.exports.kept_extent(backend, region.range);
    kept.filter(|extent| region.allocation.is_none_or(|stated| stated == extent.allocation))
}

/// Asks the driver for the allocations, and for their handles.
fn asked_for(
    runtime: &Runtime,
    backend: &Arc<dyn DeviceIpc>,
    region: &Region,
) -> Result<(Vec<Extent>, Handles)> {
    with_device_context(&**backend, region.range.device, || {
        with_allocations(runtime, backend, extents_by_driver(runtime, backend, region)?)
    })
}

fn with_allocations(
    runtime: &Runtime,
    backend: &Arc<dyn DeviceIpc>,
    extents: Vec<Extent>,
) -> Result<(Vec<Extent>, Handles)> {
    let shared = |extent| runtime.exports.allocation(backend, extent);
    let allocations = match extents.as_slice() {
        [only] => [shared(only)?].into(),
        several => several.iter().map(shared).collect::<Result<_>>()?,
    };
    Ok((extents, allocations))
}

/// Asks the driver for the allocations.
pub(crate) fn extents_by_driver(
    runtime: &Runtime,
    backend: &Arc<dyn DeviceIpc>,
    region: &Region,
) -> Result<Vec<Extent>> {
    let range = region.range;
    if runtime.imports.holds(range) {
        return Err(Error::SharedOn { ptr: range.ptr });
    }
    let extents = backend.extents_of(range, region.allocation)?;
    offset_in(range, &extents)?;
    Ok(extents)
}

/// Returns the event that importers wait for; `None` if the stream has no work, or if the host has waited for it.
pub(crate) fn ready_event(session: &Session, stream: BorrowedStream<'_>) -> Result<Option<ReadyEvent>> {
    let backend = session.backend();
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

/// Returns an isolated copy of the region, of the same length, so that no other memory is beside it. Waits until the copy is
/// complete, after the work that `after` has to complete first.
pub(super) fn isolated_copy(
    session: &Session,
    region: Region,
    after: Option<BorrowedStream<'_>>,
) -> Result<Buffer> {
    let backend = Arc::clone(session.backend());
    let copy = Buffer::allocate(backend, region.range.device, region.range.len, MemoryUse::new().isolated())?;
    clear_behind(session, copy.range())?;
    copy_and_wait(session, copy.range(), region.range, after)?;
    Ok(copy)
}

/// Clears the padding of an allocation, which may contain earlier data.
fn clear_behind(session: &Session, range: DeviceRange) -> Result<()> {
    let memory = session.backend().memory();
    let extents = session.backend().extents_of(range, None)?;
    let Some(last) = extents.last().map(|extent| extent.allocation) else { return Ok(()) };
    let (Some(end), Some(ptr)) = (last.end(), range.end()) else { return Ok(()) };
    let Some(len) = end.offset_from(ptr).filter(|len| *len > 0) else { return Ok(()) };
    let stream = memory.create_stream(range.device)?;
    // SAFETY: the bytes lie in the new buffer's allocation, which nobody else has.
    let filled = unsafe { memory.fill(DeviceRange::new(range.device, ptr, len), 0, stream.as_borrowed()) };
    memory.synchronize(stream.as_borrowed())?;
    filled
}

/// Copies on the stream, or on a new one, and waits on the host.
pub(crate) fn copy_and_wait(
    session: &Session,
    dst: DeviceRange,
    src: DeviceRange,
    stream: Option<BorrowedStream<'_>>,
) -> Result<()> {
    let memory = session.backend().memory();
    let own = if stream.is_none() { Some(memory.create_stream(src.device)?) } else { None };
    let Some(stream) = stream.or_else(|| own.as_ref().map(|own| own.as_borrowed())) else { return Ok(()) };
    // SAFETY: the source is kept by the caller's owner and the destination by the new buffer until the stream has been
    // waited for.
    let copied = unsafe { memory.copy(dst, src, stream) };
    memory.synchronize(stream)?;
    copied
}

/// Returns the offset of the region in its first allocation, and checks the driver's answer.
pub(crate) fn offset_in(range: DeviceRange, extents: &[Extent]) -> Result<u64> {
    let misfit =
        || Error::InvalidRegion(format!("{} bytes at {} leave their allocations", range.len, range.ptr));
    let first = extents.first().ok_or_else(misfit)?.allocation;
    let mut end = first.ptr;
    for extent in extents {
        if extent.allocation.ptr != end || extent.allocation.len == 0 {
            return Err(misfit());
        }
        end = extent.allocation.end().ok_or_else(misfit)?;
    }
    let offset = range.ptr.offset_from(first.ptr).filter(|offset| *offset < first.len).ok_or_else(misfit)?;
    if range.end().is_none_or(|range_end| range_end > end) {
        return Err(misfit());
    }
    Ok(offset)
}
