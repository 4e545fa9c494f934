//! The backend, and memory with known bytes.

use std::sync::Arc;

use device_ipc_ascend::AscendBackend;
use device_ipc_core::backend::{
    DeviceIpc, DeviceMemory, DeviceStream, Exported, Extent, HandleKind, VendorStatus,
};
use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

pub(crate) const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
pub(crate) const ONE: DeviceOrdinal = DeviceOrdinal::new(1);
/// The size of a huge page.
pub(crate) const HUGE: u64 = 2 << 20;

/// Returns the backend on the simulator of the scene.
pub(crate) fn backend() -> Arc<AscendBackend> {
    AscendBackend::load().expect("the simulator is available")
}

/// Returns the allocation that a range lies in.
pub(crate) fn extent_of(backend: &AscendBackend, range: DeviceRange) -> Extent {
    backend.extents_of(range, None).expect("an allocation of our own")[0]
}

pub(crate) fn range(device: DeviceOrdinal, address: u64, len: u64) -> DeviceRange {
    DeviceRange::new(device, DevicePtr::new(address), len)
}

/// Reads all bytes of a range.
pub(crate) fn read(
    backend: &AscendBackend,
    range: DeviceRange,
    stream: &dyn DeviceStream,
) -> Result<Vec<u8>> {
    let mut bytes = vec![0; range.len as usize];
    // SAFETY: the range is mapped, and not used concurrently.
    unsafe { backend.read(range, &mut bytes, stream.as_borrowed()) }.map(|()| bytes)
}

/// Writes bytes, and waits for the write.
pub(crate) fn write(
    backend: &AscendBackend,
    range: DeviceRange,
    bytes: &[u8],
    stream: &dyn DeviceStream,
) -> Result<()> {
    // SAFETY: as in `read`.
    unsafe { backend.write(range, bytes, stream.as_borrowed()) }?;
    backend.synchronize(stream.as_borrowed())
}

/// Returns a pattern whose neighbouring bytes differ; no power of two is a multiple of its period.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    let period: Vec<u8> = (0..251).collect();
    let mut bytes = period.repeat(len / period.len() + 1);
    bytes.truncate(len);
    bytes
}

/// Allocates memory with a pattern.
pub(crate) fn memory(
    backend: &AscendBackend,
    device: DeviceOrdinal,
    bytes: u64,
    kind: HandleKind,
) -> DeviceRange {
    let range = backend.allocate_as(device, bytes, kind).expect("memory");
    let stream = backend.create_stream(device).expect("a stream");
    write(backend, range, &pattern(bytes as usize), &*stream).expect("it can be written");
    range
}

/// Exports new memory with a pattern.
#[track_caller]
pub(crate) fn share(
    backend: &AscendBackend,
    device: DeviceOrdinal,
    bytes: u64,
    kind: HandleKind,
) -> Exported {
    let range = memory(backend, device, bytes, kind);
    backend.export(&extent_of(backend, range), None).expect("a handle")
}

/// Returns the status of a vendor error.
#[track_caller]
pub(crate) fn status_of<T: std::fmt::Debug>(result: Result<T>) -> (VendorStatus, String) {
    match result {
        Err(Error::Vendor(error)) => (error.status, error.to_string()),
        other => panic!("a vendor's error was expected: {other:?}"),
    }
}
