//! DLPack's descriptions of all tensors of a mapping, in one allocation.
//!
//! A state dict has thousands of tensors, and three allocations for each would cost a third of what PyTorch takes to make them.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use device_ipc::{DeviceOrdinal, DeviceRange, Dtype, TensorLayout};
use pyo3::prelude::*;

use crate::dlpack::{DlTensor, DlVersioned, device_of, signed};
use crate::dtype::{DlDtype, to_dlpack};
use crate::mapping_inner::MappingInner;

/// The descriptions of a mapping's tensors, in their order; those that were not taken are deleted with this.
pub(crate) struct ManagedViews {
    first: *mut DlVersioned,
    /// The number of tensors.
    count: usize,
    /// The position of the next one.
    next: usize,
}

/// What the descriptions need. The deleter of the last one drops it.
struct Shared {
    inner: Arc<MappingInner>,
    /// The number of descriptions that were not deleted.
    left: AtomicUsize,
    /// Consumers have pointers to its elements.
    managed: *mut [DlVersioned],
    /// The shapes, each with the strides behind it.
    _sizes: Vec<i64>,
}

impl ManagedViews {
    /// Describes the tensors of a mapping, which have these ranges. Each is counted as a use of the mapping until its description is
    /// deleted.
    pub(crate) fn new(inner: &Arc<MappingInner>, ranges: &[DeviceRange]) -> PyResult<Self> {
        let layouts = || inner.contents.tensors().map(|(_, layout)| layout);
        let mut sizes = Vec::with_capacity(layouts().map(|layout| 2 * layout.shape().len()).sum());
        let mut tensors = Vec::with_capacity(ranges.len());
        let mut kind = Kind::default();
        for (layout, range) in layouts().zip(ranges) {
            let begin = sizes.len();
            for number in layout.shape().iter().chain(layout.strides()) {
                sizes.push(signed(*number)?);
            }
            // The vector has room for all sizes, so that they keep their places.
            let tensor = kind.describe(inner, range, layout, sizes[begin..].as_mut_ptr())?;
            tensors.push(DlVersioned::new(tensor, inner.is_writable(), delete));
        }
        let count = tensors.len();
        if count == 0 {
            return Ok(Self { first: ptr::null_mut(), count, next: 0 });
        }
        inner.count_views();
        let managed = Box::into_raw(tensors.into_boxed_slice());
        let (inner, left) = (Arc::clone(inner), AtomicUsize::new(count));
        let shared = Box::into_raw(Box::new(Shared { inner, left, managed, _sizes: sizes }));
        // SAFETY: nothing else has a pointer to the descriptions yet.
        unsafe { &mut *managed }.iter_mut().for_each(|managed| managed.context = shared.cast());
        Ok(Self { first: managed.cast(), count, next: 0 })
    }

    /// Returns the next tensor's description, which keeps the memory mapped until its consumer deletes it.
    pub(crate) fn take(&mut self) -> *mut DlVersioned {
        assert!(self.next < self.count, "each tensor is taken once");
        self.next += 1;
        // SAFETY: the allocation exists until all descriptions are deleted, and this one was not taken.
        unsafe { self.first.add(self.next - 1) }
    }

    /// Deletes the next tensor's description.
    pub(crate) fn skip(&mut self) {
        let skipped = self.take();
        // SAFETY: no consumer has it.
        unsafe { delete(skipped) };
    }
}

impl Drop for ManagedViews {
    fn drop(&mut self) {
        while self.next < self.count {
            self.skip();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: it was made from a box, and all descriptions in it are deleted.
        drop(unsafe { Box::from_raw(self.managed) });
    }
}

/// The deleter of a description.
unsafe extern "C" fn delete(managed: *mut DlVersioned) {
    // SAFETY: a consumer calls it once, with the pointer that it was given. What the context points to is dropped below at the earliest.
    let shared = unsafe { (*managed).context.cast::<Shared>() };
    // SAFETY: as above.
    let Shared { inner, left, managed: first, .. } = unsafe { &*shared };
    // SAFETY: both are in one allocation.
    let position = unsafe { managed.offset_from(first.cast::<DlVersioned>()) };
    inner.uncount_view(position as usize);
    if left.fetch_sub(1, Ordering::Release) == 1 {
        fence(Ordering::Acquire);
        // SAFETY: it was the last one.
        drop(unsafe { Box::from_raw(shared) });
    }
}

/// The device and the element type of the last tensor, which most tensors share.
#[derive(Default)]
struct Kind {
    device: Option<(DeviceOrdinal, (i32, i32))>,
    dtype: Option<(Dtype, DlDtype)>,
}

impl Kind {
    /// Describes a tensor. The description of an element type that DLPack lacks is not valid.
    fn describe(
        &mut self,
        inner: &MappingInner,
        range: &DeviceRange,
        layout: &TensorLayout,
        shape: *mut i64,
    ) -> PyResult<DlTensor> {
        let (_, (device_type, device_id)) = match self.device {
            Some(last) if last.0 == range.device => last,
            _ => *self.device.insert((range.device, device_of(inner.backend, range.device.get())?)),
        };
        let (_, dtype) = match self.dtype {
            Some(last) if last.0 == layout.dtype() => last,
            _ => {
                let dtype = to_dlpack(layout.dtype()).unwrap_or(DlTensor::EMPTY.dtype);
                *self.dtype.insert((layout.dtype(), dtype))
            }
        };
        let dimensions = layout.shape().len();
        Ok(DlTensor {
            data: range.ptr.get() as *mut _,
            device_type,
            device_id,
            ndim: dimensions as i32,
            dtype,
            shape,
            strides: shape.wrapping_add(dimensions),
            byte_offset: 0,
        })
    }
}
