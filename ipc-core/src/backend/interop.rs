//! Traits for types of other crates: owners of shared memory, and streams of views.
//!
//! The marker `M` lets a backend crate implement these traits for foreign types (cudarc's `CudaSlice` and `CudaStream`)
//! without a wrapper in the user's code; callers never name it.

#![allow(unsafe_code, reason = "owners promise to keep their memory; views are created from plain ranges")]

use std::sync::Arc;

use crate::backend::stream::AsStream;
use crate::model::address::DeviceRange;
use crate::model::error::Result;
use crate::model::tensor::{Dtype, Element};

/// A region of device memory as its owner describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Region {
    /// The backend of the memory.
    pub backend: &'static str,
    /// The address range, anywhere in an allocation.
    pub range: DeviceRange,
    /// The element type, if the owner knows it.
    pub dtype: Option<Dtype>,
    /// The whole allocation, for vendors that cannot look it up (CANN before 9.0).
    pub allocation: Option<DeviceRange>,
}

impl Region {
    /// Creates a region without an element type.
    pub const fn new(backend: &'static str, range: DeviceRange) -> Self {
        Self { backend, range, dtype: None, allocation: None }
    }

    /// Sets the element type.
    pub const fn with_dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Sets the whole allocation.
    pub const fn with_allocation(mut self, allocation: DeviceRange) -> Self {
        self.allocation = Some(allocation);
        self
    }
}

/// An owner of device memory that can be shared.
///
/// # Safety
///
/// While the value lives, also after moves, the region stays allocated and is not reused for another allocation.
pub unsafe trait DeviceOwner<M = ()>: Send + 'static {
    /// Returns the owned region.
    fn region(&self) -> Region;
}

// SAFETY: the value lives at least as long as any reference that counts it.
unsafe impl<M, T: DeviceOwner<M> + Sync> DeviceOwner<M> for Arc<T> {
    fn region(&self) -> Region {
        (**self).region()
    }
}

/// A raw region together with the value that keeps it allocated, for memory of libraries without a [`DeviceOwner`].
#[derive(Debug)]
pub struct OwnedRegion<O> {
    owner: O,
    region: Region,
}

impl<O: Send + 'static> OwnedRegion<O> {
    /// Associates a region with the owner that keeps it allocated.
    ///
    /// # Safety
    ///
    /// While `owner` lives, also after moves, the region stays allocated and is not reused for another allocation.
    pub unsafe fn new(owner: O, region: Region) -> Self {
        Self { owner, region }
    }

    /// Returns the owner.
    pub fn into_owner(self) -> O {
        self.owner
    }
}

// SAFETY: the caller of `OwnedRegion::new` promised it.
unsafe impl<O: Send + 'static> DeviceOwner for OwnedRegion<O> {
    fn region(&self) -> Region {
        self.region
    }
}

/// The view types of a stream type. The marker `M` of [`ViewStream`] implements it.
pub trait ViewTypes {
    /// The type of views for reading.
    type View<'m, T: Element>;
    /// The type of views for reading and writing.
    type ViewMut<'m, T: Element>;
}

/// A stream for which typed views of device memory can be created.
pub trait ViewStream<M: ViewTypes = ()>: AsStream<M> {
    /// Creates a view of `range` as elements of `T`.
    ///
    /// # Safety
    ///
    /// The range stays mapped for `'m` and consists of whole, aligned elements.
    ///
    /// # Errors
    ///
    /// Errors of the vendor's crate.
    unsafe fn view<'m, T: Element>(&self, range: DeviceRange) -> Result<M::View<'m, T>>;

    /// Creates a writable view of `range` as elements of `T`.
    ///
    /// # Safety
    ///
    /// As for [`view`](Self::view), and the range is mapped read-write.
    ///
    /// # Errors
    ///
    /// Errors of the vendor's crate.
    unsafe fn view_mut<'m, T: Element>(&self, range: DeviceRange) -> Result<M::ViewMut<'m, T>>;
}
