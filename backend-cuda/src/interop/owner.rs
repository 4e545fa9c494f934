//! cudarc's slices as owners of shared memory.

use std::any::TypeId;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DeviceRepr};
use device_ipc_core::{DeviceOwner, DevicePtr, DeviceRange, Dtype, Element, Region};

use crate::interop::caller::{CallerState, is_capturing};
use crate::interop::marker::Cudarc;
use crate::interop::stream;
use crate::library::NAME;

/// The region has an element type for Rust's number types; for others (`half::f16`, a struct) state it when sharing the
/// slice.
// SAFETY: a slice frees its memory when it is dropped, and not before; it has no interior mutability.
unsafe impl<T: DeviceRepr + 'static> DeviceOwner<Cudarc> for CudaSlice<T> {
    fn region(&self) -> Region {
        let address = {
            let _caller = CallerState::save();
            let stream = query_stream(self.stream());
            // The guard would order later work behind a read by this stream. This call reads no memory.
            let (address, _guard) = self.device_ptr(&stream);
            address
        };
        let device = stream::ordinal(self.stream());
        let range = DeviceRange::new(device, DevicePtr::new(address), self.num_bytes() as u64);
        let region = Region::new(NAME, range);
        match dtype_of::<T>() {
            Some(dtype) => region.with_dtype(dtype),
            None => region,
        }
    }
}

/// Returns the stream for a query of a slice's address. cudarc makes that stream wait for the slice's last write, which
/// would invalidate the capture of a stream that is being captured; in that case a new stream is used.
fn query_stream(own: &Arc<CudaStream>) -> Arc<CudaStream> {
    let capturing = is_capturing(own).unwrap_or(false);
    let other = if capturing { own.context().new_stream().ok() } else { None };
    other.unwrap_or_else(|| Arc::clone(own))
}

/// Returns the element type of `T`. Compares type ids, because an implementation for [`Element`]s and one for other
/// types would overlap.
fn dtype_of<T: 'static>() -> Option<Dtype> {
    fn is<T: 'static, E: Element>() -> Option<Dtype> {
        (TypeId::of::<T>() == TypeId::of::<E>()).then_some(E::DTYPE)
    }
    None.or_else(is::<T, f32>)
        .or_else(is::<T, f64>)
        .or_else(is::<T, u8>)
        .or_else(is::<T, i8>)
        .or_else(is::<T, u16>)
        .or_else(is::<T, i16>)
        .or_else(is::<T, u32>)
        .or_else(is::<T, i32>)
        .or_else(is::<T, u64>)
        .or_else(is::<T, i64>)
        .or_else(|| (TypeId::of::<T>() == TypeId::of::<bool>()).then_some(Dtype::BOOL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_types_have_an_element_type_and_others_none() {
        assert_eq!(dtype_of::<f32>(), Some(Dtype::F32));
        assert_eq!(dtype_of::<i64>(), Some(Dtype::I64));
        assert_eq!(dtype_of::<bool>(), Some(Dtype::BOOL));
        assert_eq!(dtype_of::<[f32; 4]>(), None);
        assert_eq!(dtype_of::<usize>(), None);
    }
}
