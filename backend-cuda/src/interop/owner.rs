//! cudarc's slices as owners of shared memory.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DeviceRepr};
use device_ipc_core::{DeviceOwner, DevicePtr, DeviceRange, Dtype, Region};

use crate::interop::caller::{CallerState, is_capturing};
use crate::interop::marker::Cudarc;
use crate::interop::stream;
use crate::library::NAME;

/// The region has an element type for the types of [`Dtype::of`]: Rust's numbers, with the features `half` and `float8` also
/// theirs. For others (a struct) state it when sharing the slice.
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
        match Dtype::of::<T>() {
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
