//! Views of a mapping for cudarc's kernels and copies.
//!
//! cudarc borrows only from an owner: its `CudaView` comes from a `CudaSlice`, which frees its memory when it is
//! dropped. The exporter owns the memory of a mapping, so a view contains a slice whose destructor never runs, and
//! lends only borrowed views of it: no reference to the slice itself leaves this file, since `std::mem::swap` would
//! move the slice out of a mutable one.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs,
    PushKernelArg, SyncOnDrop, result,
};
use device_ipc_core::backend::{ViewStream, ViewTypes};
use device_ipc_core::{DeviceRange, Element, Error, Result};

use super::alloc::slice_at;
use super::caller::{CallerState, is_capturing, refuse_capture};
use super::error::vendor_error;
use super::stream::ordinal;
use crate::interop::marker::Cudarc;

/// A read-only view of a mapping, which cannot outlive the mapping (`'m`).
///
/// [`to_vec`](Self::to_vec) copies it to the host. Pass it to a kernel with `launch_builder().arg(&view)`, to a copy as `stream.memcpy_dtoh(&view, ..)`, and to
/// functions that take a `CudaView` as [`as_view`](Self::as_view). Dropping it makes its stream wait for uses on other
/// streams that cudarc has recorded.
///
/// It does not outlive the mapping:
///
/// ```compile_fail,E0597
/// # use device_ipc_cuda::interop::CudaMapped;
/// # struct Mapping;
/// # impl Mapping { fn view(&self) -> CudaMapped<'_, f32> { unimplemented!() } }
/// let view = {
///     let mapping = Mapping;
///     mapping.view()
/// };
/// drop(view);
/// ```
pub struct CudaMapped<'m, T> {
    slice: UnownedSlice<T>,
    mapping: PhantomData<&'m [T]>,
}

/// A read-write view of a mapping, which cannot outlive the mapping (`'m`).
///
/// Like [`CudaMapped`], with `launch_builder().arg(&mut view)`, `stream.memcpy_htod(.., &mut view)` and
/// [`as_view_mut`](Self::as_view_mut).
///
/// ```no_run
/// # use std::sync::Arc;
/// # use cudarc::driver::{CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg};
/// # use device_ipc_cuda::interop::{CudaMapped, CudaMappedMut};
/// fn add(
///     stream: &Arc<CudaStream>,
///     kernel: &CudaFunction,
///     mut sum: CudaMappedMut<'_, f32>,
///     other: &CudaMapped<'_, f32>,
/// ) -> Result<(), DriverError> {
///     let len = sum.len() as u64;
///     let config = LaunchConfig::for_num_elems(len as u32);
///     // SAFETY: the kernel takes two arrays and their length.
///     unsafe { stream.launch_builder(kernel).arg(&mut sum).arg(other).arg(&len).launch(config)? };
///     Ok(())
/// }
/// ```
///
/// It cannot be borrowed twice for writing:
///
/// ```compile_fail,E0499
/// # use device_ipc_cuda::interop::CudaMappedMut;
/// fn two(view: &mut CudaMappedMut<'_, f32>) {
///     let first = view.as_view_mut();
///     let second = view.as_view_mut();
///     drop((first, second));
/// }
/// ```
///
/// It exposes no slice, which would free the exporter's memory:
///
/// ```compile_fail,E0308
/// # use cudarc::driver::CudaSlice;
/// # use device_ipc_cuda::interop::CudaMappedMut;
/// fn steal(view: &mut CudaMappedMut<'_, f32>, mine: &mut CudaSlice<f32>) {
///     std::mem::swap(view, mine);
/// }
/// ```
pub struct CudaMappedMut<'m, T> {
    slice: UnownedSlice<T>,
    mapping: PhantomData<&'m mut [T]>,
}

/// A slice of memory that it does not own.
struct UnownedSlice<T>(ManuallyDrop<CudaSlice<T>>);

impl<T> UnownedSlice<T> {
    /// # Safety
    ///
    /// The range is mapped in the primary context of its device while the value is used, and holds whole, aligned
    /// elements.
    unsafe fn new(stream: &Arc<CudaStream>, range: DeviceRange) -> Result<Self> {
        if range.device != ordinal(stream) {
            return Err(Error::WrongStream {
                stream: ordinal(stream),
                what: "a view of the mapping",
                expected: range.device,
            });
        }
        if !stream.context().is_primary() {
            return Err(Error::Unsupported {
                backend: crate::library::NAME,
                what: "view a mapping on a stream outside the primary context".into(),
                why: "memory is opened in the device's primary context; pass a stream of CudaContext::new"
                    .into(),
            });
        }
        let len = range.len as usize / size_of::<T>().max(1);
        let _caller = CallerState::save();
        // Work on the view is captured with the stream, so record the capture.
        is_capturing(stream)?;
        // SAFETY: the address is valid for `len` elements, and the slice is never dropped as one.
        let slice = unsafe { slice_at(stream, range.ptr.get(), len)? };
        Ok(Self(ManuallyDrop::new(slice)))
    }
}

impl<T: Element> UnownedSlice<T> {
    fn to_vec(&self) -> Result<Vec<T>> {
        let stream = self.0.stream();
        let _caller = CallerState::save();
        refuse_capture(stream, "copy a view to the host")?;
        let count = self.0.len();
        let mut elements = Vec::<T>::with_capacity(count);
        // SAFETY: all bytes of the `count` elements are set, and every bit pattern of an element is a value.
        unsafe {
            elements.as_mut_ptr().write_bytes(0, count);
            elements.set_len(count);
        }
        if count > 0 {
            let (address, _recorded) = self.0.device_ptr(stream);
            stream.context().bind_to_thread().map_err(|error| vendor_error("cuCtxSetCurrent", error))?;
            // SAFETY: the view keeps `count` elements mapped, and the host's are kept until the stream has been waited for.
            let copied = unsafe { result::memcpy_dtoh_async(&mut elements, address, stream.cu_stream()) };
            let waited = stream.synchronize();
            copied.map_err(|error| vendor_error("cuMemcpyDtoHAsync_v2", error))?;
            waited.map_err(|error| vendor_error("cuStreamSynchronize", error))?;
        }
        Ok(elements)
    }
}

impl<T> Drop for UnownedSlice<T> {
    fn drop(&mut self) {
        let _caller = CallerState::save();
        // SAFETY: taken only here, and not used afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.0) };
        // Drops the events and the stream, and does not free the memory.
        let _address = slice.leak();
    }
}

impl ViewTypes for Cudarc {
    type View<'m, T: Element> = CudaMapped<'m, T>;
    type ViewMut<'m, T: Element> = CudaMappedMut<'m, T>;
}

impl ViewStream<Cudarc> for Arc<CudaStream> {
    unsafe fn view<'m, T: Element>(&self, range: DeviceRange) -> Result<CudaMapped<'m, T>> {
        // SAFETY: mapped for `'m`, and whole and aligned, as the caller promised.
        let slice = unsafe { UnownedSlice::new(self, range)? };
        Ok(CudaMapped { slice, mapping: PhantomData })
    }

    unsafe fn view_mut<'m, T: Element>(&self, range: DeviceRange) -> Result<CudaMappedMut<'m, T>> {
        // SAFETY: as above.
        let slice = unsafe { UnownedSlice::new(self, range)? };
        Ok(CudaMappedMut { slice, mapping: PhantomData })
    }
}

impl<T> CudaMappedMut<'_, T> {
    /// Returns the elements for reading and writing.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.0.as_view_mut()
    }
}

impl<T> DevicePtrMut<T> for CudaMappedMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.slice.0.device_ptr_mut(stream)
    }
}

// SAFETY: pushes the address of the pointer inside the view, which is borrowed for as long as the arguments.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut CudaMappedMut<'_, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut CudaMappedMut<'_, T>) -> &mut Self {
        let slice: &'b mut CudaSlice<T> = &mut arg.slice.0;
        self.arg(slice)
    }
}

macro_rules! impl_read {
    ($($view:ident),*) => { $(
        impl<T> $view<'_, T> {
            /// Returns the elements for reading.
            pub fn as_view(&self) -> CudaView<'_, T> {
                self.slice.0.as_view()
            }

            /// Returns the number of elements.
            pub fn len(&self) -> usize {
                self.slice.0.len()
            }

            /// Returns whether the view has no elements.
            pub fn is_empty(&self) -> bool {
                self.slice.0.is_empty()
            }

            /// Returns the stream of the view.
            pub fn stream(&self) -> &Arc<CudaStream> {
                self.slice.0.stream()
            }
        }

        impl<T: Element> $view<'_, T> {
            /// Copies the elements to the host after all earlier work of the view's stream, and waits for the copy.
            ///
            /// For every [`Element`], also for those that are no `DeviceRepr` of cudarc.
            ///
            /// # Errors
            ///
            /// [`Error::StreamCapturing`] while the stream is being captured; otherwise the driver's error.
            pub fn to_vec(&self) -> Result<Vec<T>> {
                self.slice.to_vec()
            }
        }

        impl<T> DeviceSlice<T> for $view<'_, T> {
            fn len(&self) -> usize {
                self.slice.0.len()
            }

            fn stream(&self) -> &Arc<CudaStream> {
                self.slice.0.stream()
            }
        }

        impl<T> DevicePtr<T> for $view<'_, T> {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                self.slice.0.device_ptr(stream)
            }
        }

        // SAFETY: as for the mutable view.
        unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b $view<'_, T>> for LaunchArgs<'a> {
            #[inline(always)]
            fn arg(&mut self, arg: &'b $view<'_, T>) -> &mut Self {
                let slice: &'b CudaSlice<T> = &arg.slice.0;
                self.arg(slice)
            }
        }

        impl<T> fmt::Debug for $view<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($view))
                    .field("len", &self.slice.0.len())
                    .field("device", &self.slice.0.ordinal())
                    .finish_non_exhaustive()
            }
        }
    )* };
}

impl_read!(CudaMapped, CudaMappedMut);
