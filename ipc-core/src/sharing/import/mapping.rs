//! The receiver's guard.

use super::held::Held;
use super::keeper::Keeper;
use super::table::Described;
use super::tensor::{Tensor, elements_of};
use crate::backend::Access;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::AsStream;
use crate::model::address::DeviceRange;
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::tensor::{Element, LayoutError, TensorLayout, TensorTable};
use crate::sharing::ErrorWith;
use crate::sharing::timeline::Timeline;
use crate::wire::descriptor::Descriptor;

/// Memory of another process, opened on a device of this one.
///
/// The lease ends when device work with the memory has finished: [`release`](Self::release) waits for a stream; after a
/// plain drop, everything submitted to the device is waited for when the lease ends, which may be later, as memory stays
/// open for the next open. Neither makes the caller wait.
#[derive(Debug)]
pub struct Mapping {
    held: Held,
    range: DeviceRange,
}

impl Mapping {
    /// Of the region that the descriptor names.
    #[inline]
    pub(super) fn new(held: Held, descriptor: &Descriptor, range: DeviceRange) -> Self {
        held.describe(descriptor);
        Self { held, range }
    }

    pub(crate) const fn held(&self) -> &Held {
        &self.held
    }

    /// The bytes: an address of this process, in the address space of [`device`](Self::device).
    pub fn range(&self) -> DeviceRange {
        self.range
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.range().len
    }

    /// Never true: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device in whose address space the mapping is.
    pub fn device(&self) -> DeviceOrdinal {
        self.held.device()
    }

    /// The device where the bytes live; of a [copy](Self::is_copy), where the original does.
    pub fn home(&self) -> DeviceIdentity {
        self.held.described().map_or_else(|| self.descriptor().home, |described| described.home)
    }

    /// Do the bytes live on the device of the mapping, so that access does not cross cards? Those of a
    /// [copy](Self::is_copy) do.
    pub fn is_at_home(&self) -> bool {
        self.held.is_at_home()
    }

    /// Is this a copy that was made when it was opened ([`OpenBuilder::or_staged`](crate::OpenBuilder::or_staged),
    /// [`OpenBuilder::staged`](crate::OpenBuilder::staged))? What either side writes from then on is not seen by the other,
    /// and neither the end of the export nor that of its process touches it.
    pub fn is_copy(&self) -> bool {
        self.held.is_copy()
    }

    /// What this process may do with the memory.
    pub fn access(&self) -> Access {
        self.held.access()
    }

    /// Element type, shape and strides, where the exporter stated them.
    pub fn layout(&self) -> Option<&TensorLayout> {
        self.held.described().map_or_else(|| self.descriptor().layout(), Described::layout)
    }

    /// What the mapping was opened by, with the address at which the exporter was reached. Forward it to let a third process
    /// open the memory.
    pub fn descriptor(&self) -> &Descriptor {
        self.held.descriptor()
    }

    /// Makes the stream wait, on the device, until the bytes are ready. [`OpenBuilder::on`](crate::OpenBuilder::on) and
    /// the views do so by themselves.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] for a stream of another backend, else what the vendor says.
    pub fn wait_ready<M>(&self, stream: &impl AsStream<M>) -> Result<()> {
        self.held.check_process()?;
        self.held.wait_ready_on(stream.as_stream())
    }

    /// The timeline between this process and the exporter, for hand-overs that repeat without either host waiting.
    /// Mappings that share a lease (the same export on the same device with the same access) share it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the mapping's device has no timelines, and for a [copy](Self::is_copy);
    /// [`Error::ExporterGone`], [`Error::ExportDropped`], and what else a message to the exporter can meet.
    pub fn timeline(&self) -> Result<Timeline> {
        self.held.timeline()
    }

    /// The elements, to be read by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// The view's type is the stream's: [`View`](crate::View) on a [`Stream`](crate::Stream), what takes part in
    /// cudarc's kernels and copies on cudarc's `CudaStream`. Name the element type only where it cannot be inferred:
    /// `mapping.view::<f32, _>(&stream)`.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device; [`Error::Layout`] for another element type than the
    /// tensor's, a tensor with gaps, or bytes that are not whole, aligned elements.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, T>> {
        Keeper::from(&self.held).view(self.viewable()?, self.layout(), stream)
    }

    /// The elements, to be read and written by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// As [`view`](Self::view), and [`Error::AccessDenied`] for a read-only mapping.
    pub fn view_mut<T: Element, M: ViewTypes>(
        &self,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'_, T>> {
        Keeper::from(&self.held).view_mut(self.viewable()?, self.layout(), stream)
    }

    /// The bytes of the tensor, where there is one, else all.
    fn viewable(&self) -> Result<DeviceRange> {
        self.layout().map_or(Ok(self.range), |layout| elements_of(layout, self.range))
    }

    /// The tensor that the exporter stated.
    ///
    /// # Errors
    ///
    /// [`LayoutError::NoTensor`] where it stated none.
    pub fn tensor(&self) -> Result<Tensor<'_>> {
        Tensor::new(&self.held, self.range, self.layout().ok_or(LayoutError::NoTensor)?)
    }

    /// The tensor of this name in a table that came by any road: one of many that lie in the region.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`]; [`Error::Descriptor`] for one that does not fit the region.
    pub fn tensor_in<'m>(&'m self, table: &'m TensorTable, name: &str) -> Result<Tensor<'m>> {
        Tensor::in_table(&self.held, self.range, table, name)
    }

    /// Has `callback` run, once, when the exporter has ended; at once where it has already. It runs on a thread of the
    /// library, with the context of the mapping's device current, and not at all for memory of this very process, for a
    /// [copy](Self::is_copy), or once the mapping is gone. Calls that wait are refused there ([`Error::OnWorkerThread`]).
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.held.on_gone(callback);
    }

    /// Ends the mapping when the stream gets here: work submitted to it so far may still use the memory.
    ///
    /// Work on other streams must have been ordered before that, by an event. Does not wait.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which gives the mapping back: [`Error::WrongStream`]; [`Error::StreamCapturing`], and the capture
    /// is intact as long as the mapping is kept (a plain drop waits for the device, which CUDA permits in no capture);
    /// else what the vendor says.
    pub fn release<M>(self, stream: &impl AsStream<M>) -> Result<(), ErrorWith<Self>> {
        match self.held.released_event(stream.as_stream()) {
            Ok(event) => self.held.end_at(event),
            Err(error) => return Err(ErrorWith::new(error, self)),
        }
        Ok(())
    }

    /// Ends the mapping. The caller knows that device work with the memory has finished.
    pub(crate) fn end_finished(self) {
        self.held.end_finished();
    }
}

/// From the allocations as the driver mapped them to the region that the descriptor names. In the exporting process itself,
/// and of a copy, there is only the region.
pub(super) fn region_of(held: &Held, descriptor: &Descriptor) -> Result<DeviceRange> {
    let mapped = held.regions()[0];
    if !held.has_allocations() {
        return Ok(mapped);
    }
    let (offset, len) = (descriptor.offset, descriptor.len);
    mapped.slice(offset, len).ok_or_else(|| {
        let mapped = mapped.len;
        Error::InvalidRegion(format!(
            "the descriptor names {len} bytes at offset {offset}, and the driver mapped {mapped} bytes"
        ))
    })
}
