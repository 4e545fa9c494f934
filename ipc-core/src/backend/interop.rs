//! How types of other crates take part: as owners of memory that is shared, and as streams that views are taken on.
//!
//! The marker `M` lets a backend implement these traits for types that are not its own (cudarc's `CudaSlice` and
//! `CudaStream`) without a wrapper in the user's code; callers never name it.

#![allow(unsafe_code, reason = "owners promise to keep their memory; views are made of plain ranges")]

use std::sync::Arc;

use crate::backend::stream::AsStream;
use crate::model::address::DeviceRange;
use crate::model::error::Result;
use crate::model::tensor::{Dtype, Element};

/// A region of device memory, as its owner describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The backend that the memory belongs to.
    pub backend: &'static str,
    /// The bytes; they may lie anywhere in an allocation.
    pub range: DeviceRange,
    /// The type of the elements, where the owner knows it.
    pub dtype: Option<Dtype>,
    /// The whole allocation, for vendors that cannot tell it themselves (CANN before 9.0).
    pub allocation: Option<DeviceRange>,
}

impl Region {
    /// A region without a type.
    pub const fn new(backend: &'static str, range: DeviceRange) -> Self {
        Self { backend, range, dtype: None, allocation: None }
    }

    /// States the type of the elements.
    pub const fn with_dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// States the whole allocation.
    pub const fn with_allocation(mut self, allocation: DeviceRange) -> Self {
        self.allocation = Some(allocation);
        self
    }
}

/// Something that owns device memory and can be shared.
///
/// # Safety
///
/// While the value lives, wherever it is moved, the region stays allocated and is not given to anybody else.
pub unsafe trait DeviceOwner<M = ()>: Send + 'static {
    /// The memory.
    fn region(&self) -> Region;
}

// SAFETY: the value lives at least as long as any reference that counts it.
unsafe impl<M, T: DeviceOwner<M> + Sync> DeviceOwner<M> for Arc<T> {
    fn region(&self) -> Region {
        (**self).region()
    }
}

/// A raw address together with the value that keeps it allocated: for memory of any library that has no
/// [`DeviceOwner`] of its own.
#[derive(Debug)]
pub struct OwnedRegion<O> {
    owner: O,
    region: Region,
}

impl<O: Send + 'static> OwnedRegion<O> {
    /// Says that `owner` keeps `region` allocated.
    ///
    /// # Safety
    ///
    /// While `owner` lives, wherever it is moved, the region stays allocated and is not given to anybody else.
    pub unsafe fn new(owner: O, region: Region) -> Self {
        Self { owner, region }
    }

    /// Gives the owner back.
    pub fn into_owner(self) -> O {
        self.owner
    }
}

// SAFETY: `OwnedRegion::new` had the caller promise it.
unsafe impl<O: Send + 'static> DeviceOwner for OwnedRegion<O> {
    fn region(&self) -> Region {
        self.region
    }
}

/// The types of the views that are taken on a kind of stream; the marker `M` of [`ViewStream`] implements it.
pub trait ViewTypes {
    /// A view that reads.
    type View<'m, T: Element>;
    /// A view that reads and writes.
    type ViewMut<'m, T: Element>;
}

/// A stream that typed views of a mapping are taken on.
pub trait ViewStream<M: ViewTypes = ()>: AsStream<M> {
    /// A view of `range` as elements of `T`.
    ///
    /// # Safety
    ///
    /// The range stays mapped for `'m`, and holds whole, aligned elements.
    ///
    /// # Errors
    ///
    /// What the vendor's crate says.
    unsafe fn view<'m, T: Element>(&self, range: DeviceRange) -> Result<M::View<'m, T>>;

    /// A view of `range` as elements of `T` that can be written.
    ///
    /// # Safety
    ///
    /// As [`view`](Self::view), and the range is mapped read-write.
    ///
    /// # Errors
    ///
    /// What the vendor's crate says.
    unsafe fn view_mut<'m, T: Element>(&self, range: DeviceRange) -> Result<M::ViewMut<'m, T>>;
}
