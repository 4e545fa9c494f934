//! The builder of an export.

use std::fmt;
use std::sync::Arc;

use super::exposure::ExposurePolicy;
use super::guard::Export;
use crate::backend::interop::Region;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{Access, DeviceBound};
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::model::tensor::Dtype;
#[cfg(doc)]
use crate::model::tensor::LayoutError;
use crate::sharing::claims::ClaimTable;
use crate::sharing::{Ipc, RecoverableError};

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
    pub(super) ipc: &'a Ipc,
    pub(super) owner: DeviceBound<O>,
    /// The region; empty for named tensors.
    pub(super) region: Region,
    start: fn(Self) -> Result<Export, RecoverableError<O>>,
    pub(super) dtype: Option<Dtype>,
    pub(super) shape: Option<Vec<u64>>,
    pub(super) strides: Option<Vec<u64>>,
    pub(super) offset: u64,
    pub(super) access: Access,
    /// At most one stream for each device.
    pub(super) ready: OneOrMany<BorrowedStream<'a>>,
    pub(super) borrowed: bool,
    pub(super) ahead: bool,
    pub(super) claims: Option<Arc<ClaimTable>>,
    pub(super) exposing: ExposurePolicy,
}

impl<'a, O: Send + 'static> ShareBuilder<'a, O> {
    pub(crate) fn new(ipc: &'a Ipc, owner: O, region: Region) -> Self {
        let owner = DeviceBound::of_region(ipc.backend(), &region, owner);
        let dtype = region.dtype;
        Self { dtype, ..Self::with(ipc, owner, region, Self::start_region) }
    }

    /// Creates the builder for an owner of several memories.
    pub(super) fn unplaced(
        ipc: &'a Ipc,
        owner: O,
        start: fn(Self) -> Result<Export, RecoverableError<O>>,
    ) -> Self {
        let range = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::NULL, 0);
        let region = Region { backend: ipc.backend().info().name, range, allocation: None, dtype: None };
        Self::with(ipc, DeviceBound::unbound(owner), region, start)
    }

    fn with(
        ipc: &'a Ipc,
        owner: DeviceBound<O>,
        region: Region,
        start: fn(Self) -> Result<Export, RecoverableError<O>>,
    ) -> Self {
        Self {
            ipc,
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
            claims: None,
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

    /// Hands this table of claims to importers that ask for it ([`Mapping::claims`](crate::Mapping::claims)). The claims of an
    /// importer are released when its connection ends.
    #[doc(hidden)]
    pub fn claims(mut self, table: &Arc<ClaimTable>) -> Self {
        self.claims = Some(Arc::clone(table));
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
    /// [`RecoverableError`], which contains the owner and the reason: memory that cannot be shared ([`Error::NotShareable`], with the
    /// remedy), a layout that does not fit, a region that does not begin at a multiple of the element size
    /// ([`LayoutError::Unaligned`]), memory that was opened from another process ([`Error::SharedOn`]), or the vendor's error.
    pub fn start(self) -> Result<Export, RecoverableError<O>> {
        (self.start)(self)
    }

    /// Returns the error of an export that cannot be made.
    pub(crate) fn refuse(self, error: Error) -> RecoverableError<O> {
        RecoverableError::bound(error, self.owner)
    }
}

impl<O> fmt::Debug for ShareBuilder<'_, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShareBuilder").field("region", &self.region).finish_non_exhaustive()
    }
}
