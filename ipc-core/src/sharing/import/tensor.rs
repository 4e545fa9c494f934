//! Tensors in the memory of a guard.

use super::view_owner::ViewOwner;
use crate::backend::Access;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::AsStream;
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::model::tensor::{Dtype, Element, NamedTensor, TensorLayout, TensorTable};

/// A tensor in a [`Mapping`](crate::Mapping), or in a slot of a [`Ring`](crate::Ring), which it borrows.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// use device_ipc_core::{Dtype, TensorLayout};
/// let stream = ipc.create_stream(0)?;
/// let mut set = ipc.tensors();
/// set.owned("bias", ipc.allocate(0, 8)?, Some(TensorLayout::contiguous(Dtype::F32, [2])?))?;
/// let export = ipc.share_all(set).start()?;
/// let mapping = ipc.open(export.descriptor()).on(&stream)?;
/// let bias = mapping.get("bias")?;
/// bias.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0])?;
/// assert_eq!((bias.shape(), bias.view::<f32, _>(&stream)?.to_vec()?), (&[2][..], vec![1.0, 2.0]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'m> {
    keeper: ViewOwner<'m>,
    range: DeviceRange,
    layout: &'m TensorLayout,
}

impl<'m> Tensor<'m> {
    /// Creates the tensor with this layout in a region of the memory.
    pub(crate) fn new(
        keeper: impl Into<ViewOwner<'m>>,
        region: DeviceRange,
        layout: &'m TensorLayout,
    ) -> Result<Self> {
        Ok(Self { keeper: keeper.into(), range: layout.elements_in(region)?, layout })
    }

    /// Creates the tensor of this name in a table that describes the region.
    pub(crate) fn in_table(
        keeper: impl Into<ViewOwner<'m>>,
        region: DeviceRange,
        table: &'m TensorTable,
        name: &str,
    ) -> Result<Self> {
        Self::of(keeper, region, table.at(table.find(name)?))
    }

    /// Creates the tensor of a table entry.
    pub(crate) fn of(
        keeper: impl Into<ViewOwner<'m>>,
        region: DeviceRange,
        tensor: NamedTensor<'m>,
    ) -> Result<Self> {
        let range = tensor.elements_in(region)?;
        Ok(Self::at(keeper, range, tensor.layout))
    }

    /// Creates the tensor with these bytes.
    pub(super) fn at(keeper: impl Into<ViewOwner<'m>>, range: DeviceRange, layout: &'m TensorLayout) -> Self {
        Self { keeper: keeper.into(), range, layout }
    }

    /// Returns the range from the first element to the end of the last one, with the gaps between them; the layout's
    /// [offset](TensorLayout::element_offset) is before it. It is empty for a tensor without elements.
    pub fn range(&self) -> DeviceRange {
        self.keeper.note_use();
        self.range
    }

    /// Returns the layout. Its offset counts from the start of the region that the exporter named.
    pub const fn layout(&self) -> &'m TensorLayout {
        self.layout
    }

    /// Returns the element type.
    pub const fn dtype(&self) -> Dtype {
        self.layout.dtype()
    }

    /// Returns the size of each dimension in elements.
    pub fn shape(&self) -> &'m [u64] {
        self.layout.shape()
    }

    /// Returns the device whose address space the tensor is in.
    pub const fn device(&self) -> DeviceOrdinal {
        self.range.device
    }

    /// Returns the access of this process to the memory.
    pub fn access(&self) -> Access {
        self.keeper.access()
    }

    /// Returns a view of the elements for reading by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`](crate::Error::WrongStream) for a stream of another device;
    /// [`Error::Layout`](crate::Error::Layout) for another element type than the
    /// tensor's, a tensor with gaps, or an address that is not aligned for the element.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'m, T>> {
        self.keeper.view(self.range, Some(self.layout), stream)
    }

    /// Returns a view of the elements for reading and writing by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// As [`view`](Self::view), and [`Error::AccessDenied`](crate::Error::AccessDenied) for memory that was opened read-only.
    pub fn view_mut<T: Element, M: ViewTypes>(
        &self,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'m, T>> {
        self.keeper.view_mut(self.range, Some(self.layout), stream)
    }

    /// Returns a view of the bytes for reading by work on `stream`: of a tensor of any element type and with any strides. The
    /// stream waits until the bytes are ready.
    ///
    /// They are those of [`range`](Self::range): from the first element to the end of the last one, with the gaps between them.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`](crate::Error::WrongStream) for a stream of another device.
    pub fn view_bytes<M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'m, u8>> {
        self.keeper.view_bytes(self.range, stream)
    }

    /// Returns a view of the bytes for reading and writing by work on `stream`.
    ///
    /// # Errors
    ///
    /// As for [`view_bytes`](Self::view_bytes), and [`Error::AccessDenied`](crate::Error::AccessDenied) for memory that was opened read-only.
    pub fn view_bytes_mut<M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::ViewMut<'m, u8>> {
        self.keeper.view_bytes_mut(self.range, stream)
    }

    /// Copies the elements to the host in row-major order, and waits for the copy. The stream waits first until the bytes are
    /// ready.
    ///
    /// The elements of a tensor with gaps are gathered: the bytes from its first element to its last are copied, and the host
    /// picks the elements. Elements that strides of 0 repeat are repeated on the host, up to 64 MiB in all.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`](crate::Error::WrongStream) for a stream of another device; [`Error::Layout`](crate::Error::Layout) for another element type than the
    /// tensor's ([`to_host_bytes`](Self::to_host_bytes) takes any), bytes that are not whole, aligned elements, or a tensor whose
    /// repeated elements exceed the limit ([`LayoutError::Repeated`](crate::LayoutError::Repeated));
    /// [`Error::Io`](crate::Error::Io) if the host has no memory for the elements; otherwise the vendor's error.
    ///
    /// # Examples
    ///
    /// ```
    /// use device_ipc_core::Dtype;
    ///
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// # let stream = ipc.create_stream(0)?;
    /// let memory = ipc.allocate(0, 6 * 4)?;
    /// memory.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    /// let transposed = ipc.share(memory).dtype(Dtype::F32).shape([3, 2]).strides([1, 3]);
    /// let export = transposed.ready_on(&stream).start()?;
    ///
    /// let mapping = ipc.open(export.descriptor()).on(&stream)?;
    /// let elements: Vec<f32> = mapping.tensor()?.to_host(&stream)?;
    /// assert_eq!(elements, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_host<T: Element, M>(&self, stream: &impl AsStream<M>) -> Result<Vec<T>> {
        self.keeper.to_host(self.range, Some(self.layout), stream.as_stream())
    }

    /// Copies the bytes of the elements to the host, as [`to_host`](Self::to_host) does: for any element type.
    ///
    /// # Errors
    ///
    /// As for [`to_host`](Self::to_host), except that no element type is wrong.
    pub fn to_host_bytes<M>(&self, stream: &impl AsStream<M>) -> Result<Vec<u8>> {
        self.keeper.to_host_bytes(self.range, Some(self.layout), stream.as_stream())
    }
}
