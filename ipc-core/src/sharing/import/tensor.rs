//! A tensor that lies in memory that a guard keeps.

use super::keeper::Keeper;
use crate::backend::Access;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::model::tensor::{Dtype, Element, LayoutError, NamedTensor, TensorLayout, TensorTable};

/// A tensor that lies in a [`Mapping`](crate::Mapping) or in a slot of a [`Ring`](crate::Ring), which it borrows.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'m> {
    keeper: Keeper<'m>,
    range: DeviceRange,
    layout: &'m TensorLayout,
}

impl<'m> Tensor<'m> {
    /// The tensor that lies in this region of the memory as the layout says.
    pub(crate) fn new(
        keeper: impl Into<Keeper<'m>>,
        region: DeviceRange,
        layout: &'m TensorLayout,
    ) -> Result<Self> {
        Ok(Self { keeper: keeper.into(), range: elements_of(layout, region)?, layout })
    }

    /// The tensor of this name in a table of what lies in this region.
    pub(crate) fn in_table(
        keeper: impl Into<Keeper<'m>>,
        region: DeviceRange,
        table: &'m TensorTable,
        name: &str,
    ) -> Result<Self> {
        Self::of(keeper, region, table.at(table.find(name)?))
    }

    /// The tensor that lies in this region of the memory as its entry says.
    pub(crate) fn of(
        keeper: impl Into<Keeper<'m>>,
        region: DeviceRange,
        tensor: NamedTensor<'m>,
    ) -> Result<Self> {
        tensor.check_fits(region.len)?;
        let behind = region.slice(tensor.offset, region.len - tensor.offset).ok_or(LayoutError::Overflow)?;
        Self::new(keeper, behind, tensor.layout)
    }

    /// The bytes from the first element to the end of the last, those between rows included: the layout's
    /// [offset](TensorLayout::offset) lies before them. No bytes for a tensor without elements.
    pub const fn range(&self) -> DeviceRange {
        self.range
    }

    /// Element type, shape and strides. The offset counts from the start of the region that the exporter named.
    pub const fn layout(&self) -> &'m TensorLayout {
        self.layout
    }

    /// The type of the elements.
    pub const fn dtype(&self) -> Dtype {
        self.layout.dtype()
    }

    /// The size of each dimension, in elements.
    pub fn shape(&self) -> &'m [u64] {
        self.layout.shape()
    }

    /// The device in whose address space the bytes are.
    pub const fn device(&self) -> DeviceOrdinal {
        self.range.device
    }

    /// What this process may do with the memory.
    pub fn access(&self) -> Access {
        self.keeper.access()
    }

    /// The elements, to be read by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`](crate::Error::WrongStream) for a stream of another device;
    /// [`Error::Layout`](crate::Error::Layout) for another element type than the
    /// tensor's, a tensor with gaps, or an address that is not aligned for the element.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'m, T>> {
        self.keeper.view(self.range, Some(self.layout), stream)
    }

    /// The elements, to be read and written by work on `stream`. The stream waits until the bytes are ready.
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
}

/// The bytes from a tensor's first element to the end of its last.
pub(super) fn elements_of(layout: &TensorLayout, region: DeviceRange) -> Result<DeviceRange> {
    layout.check_fits(region.len)?;
    let (start, end) = if layout.is_empty() { (0, 0) } else { (layout.start_bytes()?, layout.span_bytes()?) };
    Ok(region.slice(start, end - start).ok_or(LayoutError::Overflow)?)
}
