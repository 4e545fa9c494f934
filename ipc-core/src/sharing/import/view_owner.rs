//! Views of the memory of a guard: opened memory, and memory of this process.

#![allow(unsafe_code, reason = "views are made of ranges that their guard keeps mapped")]

use super::mapping::Mapping;
use super::open_part::OpenPart;
use super::own::OwnMemory;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::BorrowedStream;
use crate::backend::{Access, check_whole_elements, read_elements, read_tensor};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::model::tensor::{Element, LayoutError, TensorLayout};

/// The guard that keeps the memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ViewOwner<'m> {
    /// Opened memory.
    Opened(&'m OpenPart),
    /// Memory of this process.
    Own(&'m OwnMemory),
    /// Mappings side by side in a reservation, at least one.
    SideBySide(&'m [&'m Mapping]),
}

impl<'m> From<&'m OpenPart> for ViewOwner<'m> {
    fn from(part: &'m OpenPart) -> Self {
        Self::Opened(part)
    }
}

impl<'m> From<&'m OwnMemory> for ViewOwner<'m> {
    fn from(own: &'m OwnMemory) -> Self {
        Self::Own(own)
    }
}

impl<'m> ViewOwner<'m> {
    /// Returns a view of elements for reading by work on `stream`, which waits until the bytes are ready.
    pub(crate) fn view<T: Element, M: ViewTypes>(
        self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: &impl ViewStream<M>,
    ) -> Result<M::View<'m, T>> {
        self.check_viewable::<T>(range, layout, stream.as_stream())?;
        self.note_use();
        // SAFETY: the view borrows the guard, the caller names bytes in its regions, and size and alignment have been
        // checked.
        unsafe { stream.view(range) }
    }

    /// Returns a view of elements for reading and writing by work on `stream`, which waits until the bytes are ready.
    pub(crate) fn view_mut<T: Element, M: ViewTypes>(
        self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'m, T>> {
        let granted = self.access();
        if !granted.is_writable() {
            return Err(Error::AccessDenied { wanted: Access::ReadWrite, granted });
        }
        self.check_viewable::<T>(range, layout, stream.as_stream())?;
        self.note_use();
        // SAFETY: as in `view`; the memory may be written. Views are device addresses: what two streams or two processes
        // do with them at a time is for events to order, as with all device memory.
        unsafe { stream.view_mut(range) }
    }

    /// Returns a view of all bytes of the range for reading by work on `stream`.
    pub(crate) fn view_bytes<M: ViewTypes>(
        self,
        range: DeviceRange,
        stream: &impl ViewStream<M>,
    ) -> Result<M::View<'m, u8>> {
        self.view(range, None, stream)
    }

    /// Returns a view of all bytes of the range for reading and writing by work on `stream`.
    pub(crate) fn view_bytes_mut<M: ViewTypes>(
        self,
        range: DeviceRange,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'m, u8>> {
        self.view_mut(range, None, stream)
    }

    /// Copies the elements to the host in row-major order, after the stream has waited until the bytes are ready.
    pub(crate) fn to_host<T: Element>(
        self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: BorrowedStream<'_>,
    ) -> Result<Vec<T>> {
        self.check_usable_on(stream)?;
        check_dtype::<T>(layout)?;
        check_whole_elements::<T>(range)?;
        self.read(range, layout, stream)
    }

    /// Copies the bytes of the elements to the host, as [`to_host`](Self::to_host) does.
    pub(crate) fn to_host_bytes(
        self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: BorrowedStream<'_>,
    ) -> Result<Vec<u8>> {
        self.check_usable_on(stream)?;
        self.read(range, layout, stream)
    }

    /// Copies the elements of a usable range to the host.
    fn read<T: Element>(
        self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: BorrowedStream<'_>,
    ) -> Result<Vec<T>> {
        self.wait_ready_on(stream)?;
        let memory = match self {
            Self::Opened(part) => part.backend().memory(),
            Self::Own(own) => own.backend().memory(),
            Self::SideBySide(mappings) => mappings[0].first_part().backend().memory(),
        };
        // SAFETY: the guard keeps the memory while this runs, and the caller names bytes in its regions.
        let read = unsafe {
            match layout {
                Some(layout) => read_tensor(memory, range, layout, stream),
                None => read_elements(memory, range, stream),
            }
        };
        // The copy has been waited for, unless that failed.
        read.inspect_err(|_| self.note_use())
    }

    /// Returns the parts of the mappings side by side.
    fn parts(self) -> impl Iterator<Item = &'m OpenPart> {
        let mappings = if let Self::SideBySide(mappings) = self { mappings } else { &[] };
        mappings.iter().flat_map(|mapping| mapping.parts.iter())
    }

    /// Notes that device work may use the memory from now on.
    pub(super) fn note_use(self) {
        match self {
            Self::Opened(held) => held.note_use(),
            Self::Own(_) => {}
            Self::SideBySide(_) => self.parts().for_each(OpenPart::note_use),
        }
    }

    /// Returns the access of this process to the memory.
    pub(super) fn access(self) -> Access {
        match self {
            Self::Opened(part) => part.access(),
            Self::Own(_) => Access::ReadWrite,
            Self::SideBySide(_) => match self.parts().find(|part| !part.access().is_writable()) {
                Some(part) => part.access(),
                None => Access::ReadWrite,
            },
        }
    }

    fn check_viewable<T: Element>(
        self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        self.check_usable_on(stream)?;
        check_elements::<T>(range, layout)?;
        self.wait_ready_on(stream)
    }

    /// Checks that work on the stream may use the memory now.
    fn check_usable_on(self, stream: BorrowedStream<'_>) -> Result<()> {
        match self {
            Self::Opened(part) => part.check_usable_on(stream),
            Self::Own(own) => own.check_usable_on(stream),
            Self::SideBySide(_) => self.parts().try_for_each(|part| part.check_usable_on(stream)),
        }
    }

    /// Makes the stream wait until the bytes are ready.
    fn wait_ready_on(self, stream: BorrowedStream<'_>) -> Result<()> {
        match self {
            Self::Opened(part) => part.wait_ready_on(stream),
            Self::Own(_) => Ok(()),
            Self::SideBySide(_) => self.parts().try_for_each(|part| part.wait_ready_on(stream)),
        }
    }
}

/// Checks that the bytes are whole, aligned, contiguous elements of this type.
fn check_elements<T: Element>(range: DeviceRange, layout: Option<&TensorLayout>) -> Result<()> {
    check_dtype::<T>(layout)?;
    if let Some(layout) = layout.filter(|layout| !layout.is_contiguous()) {
        let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
        return Err(LayoutError::NotContiguous { shape, strides }.into());
    }
    check_whole_elements::<T>(range)
}

fn check_dtype<T: Element>(layout: Option<&TensorLayout>) -> Result<()> {
    match layout {
        Some(layout) if layout.dtype() != T::DTYPE => {
            Err(LayoutError::WrongDtype { actual: layout.dtype(), wanted: T::DTYPE }.into())
        }
        _ => Ok(()),
    }
}
