//! The few calls that the library cannot make safe: addresses on trust, bare ranges.

#![allow(unsafe_code, reason = "the suite hands bad addresses to the library on purpose")]

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use device_ipc_core::backend::{DeviceIpc, HandleKind, TestKernels};
use device_ipc_core::{
    AsStream, BorrowedStream, DeviceOrdinal, DeviceRange, Ipc, OwnedRegion, Region, Result, ShareBuilder,
};

/// An owner of a region that owns nothing: for addresses that the library is to refuse.
///
/// The suite never reads what is shared like this, and expects the share to be refused.
pub fn not_owned(region: Region) -> OwnedRegion<()> {
    // SAFETY: nobody accesses the region; the share is to be refused. Where it is not, the case fails and its process
    // ends.
    unsafe { OwnedRegion::new((), region) }
}

/// An owner that keeps `region` allocated, with something else that is to be dropped along with it.
///
/// `owner` must hold whatever keeps the region allocated.
pub fn owned<O: Send + 'static>(owner: O, region: Region) -> OwnedRegion<O> {
    // SAFETY: callers are cases, which pass the buffer or the mapping that the region lies in.
    unsafe { OwnedRegion::new(owner, region) }
}

/// A share of a region that the export does not keep: for tests of what is noticed when it is freed.
///
/// The caller frees the region early only on backends where that harms nothing.
pub fn share_borrowed(ipc: &Ipc, region: Region) -> ShareBuilder<'_, ()> {
    // SAFETY: callers are tests, as above.
    unsafe { ipc.share_borrowed(region) }
}

/// A share of a region without bytes and without an owner.
///
/// # Panics
///
/// Where the region has bytes.
pub fn share_borrowed_without_bytes(ipc: &Ipc, region: Region) -> ShareBuilder<'_, ()> {
    assert_eq!(region.range.len, 0, "it has no bytes");
    // SAFETY: there are no bytes that could be freed.
    unsafe { ipc.share_borrowed(region) }
}

/// A stream that claims to be another backend's: for calls that are to refuse it before they use it.
pub fn stream_of_another_backend() -> BorrowedStream<'static> {
    // SAFETY: the value is only given to calls that check the backend's name first; where one does not, the process
    // that finds this out is the case's own.
    unsafe { BorrowedStream::from_raw("another-backend", DeviceOrdinal::new(0), 0) }
}

/// Another descriptor of a file that this process has inherited open under this number.
///
/// # Errors
///
/// The system's error, as for a number that is not open.
pub fn inherited(number: RawFd) -> std::io::Result<OwnedFd> {
    // SAFETY: inherited descriptors belong to no value of this process, so that nothing closes them meanwhile; a number
    // that is not open is an error of the duplication.
    unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()
}

/// Plain device memory of the bare backend, freed on drop.
#[derive(Debug)]
pub struct Bare<'a> {
    backend: &'a dyn DeviceIpc,
    /// The bytes.
    pub range: DeviceRange,
}

impl<'a> Bare<'a> {
    /// Allocates.
    pub fn allocate(backend: &'a dyn DeviceIpc, device: DeviceOrdinal, bytes: u64) -> Result<Self> {
        Ok(Self { backend, range: backend.memory().allocate(device, bytes)? })
    }

    /// Allocates for a kind of handle.
    pub fn allocate_as(
        backend: &'a dyn DeviceIpc,
        device: DeviceOrdinal,
        bytes: u64,
        kind: HandleKind,
    ) -> Result<Self> {
        Ok(Self { backend, range: backend.memory().allocate_as(device, bytes, kind)? })
    }

    /// Submits setting every byte of a part.
    pub fn fill(&self, part: DeviceRange, byte: u8, stream: &impl AsStream) -> Result<()> {
        assert!(self.range.contains(&part), "a case may only touch its own memory");
        // SAFETY: the part is allocated until the drop, which waits for the device.
        unsafe { self.backend.memory().fill(part, byte, stream.as_stream()) }
    }

    /// Submits a kernel that adds to every float of a part.
    pub fn add(&self, part: DeviceRange, value: f32, stream: &impl AsStream) -> Result<()> {
        assert!(self.range.contains(&part), "a case may only touch its own memory");
        // SAFETY: as in `fill`.
        unsafe { test_kernels(self.backend).add_f32(part, value, stream.as_stream()) }
    }

    /// Submits writing host bytes, of whatever length.
    pub fn write(&self, part: DeviceRange, bytes: &[u8], stream: &impl AsStream) -> Result<()> {
        assert!(self.range.contains(&part), "a case may only touch its own memory");
        // SAFETY: as in `fill`; another length is to be refused.
        unsafe { self.backend.memory().write(part, bytes, stream.as_stream()) }
    }

    /// Submits a copy between two parts.
    pub fn copy_part(&self, to: DeviceRange, from: DeviceRange, stream: &impl AsStream) -> Result<()> {
        assert!(
            self.range.contains(&to) && self.range.contains(&from),
            "a case may only touch its own memory"
        );
        // SAFETY: as in `fill`.
        unsafe { self.backend.memory().copy(to, from, stream.as_stream()) }
    }

    /// Submits a copy from other bare memory, of whatever length.
    pub fn copy_from(&self, source: &Bare<'_>, stream: &impl AsStream) -> Result<()> {
        // SAFETY: as in `fill`, for both; another length is to be refused.
        unsafe { self.backend.memory().copy(self.range, source.range, stream.as_stream()) }
    }

    /// Reads a part.
    pub fn read(&self, part: DeviceRange, stream: &impl AsStream) -> Result<Vec<u8>> {
        assert!(self.range.contains(&part), "a case may only touch its own memory");
        let mut bytes = vec![0; part.len as usize];
        // SAFETY: as in `fill`.
        unsafe { self.backend.memory().read(part, &mut bytes, stream.as_stream()) }?;
        Ok(bytes)
    }
}

impl Drop for Bare<'_> {
    fn drop(&mut self) {
        let waited = self.backend.synchronize_device(self.range.device);
        // SAFETY: the range came from `allocate`, and is freed here alone.
        let freed = unsafe { self.backend.memory().free(self.range) };
        if let Err(error) = waited.and(freed) {
            eprintln!("memory of a case could not be freed: {error}");
        }
    }
}

/// The test kernels, which the suite requires.
fn test_kernels(backend: &dyn DeviceIpc) -> &dyn TestKernels {
    backend.test_kernels().expect("the suite requires DeviceIpc::test_kernels")
}

/// Gives every call of a backend that takes a stream one of another backend. Returns the calls with their results.
///
/// # Errors
///
/// The backend's, of making an event.
pub fn use_stream_of_another_backend(
    backend: &Arc<dyn DeviceIpc>,
    memory: &Bare<'_>,
) -> Result<Vec<(&'static str, Result<()>)>> {
    let (calls, kernels, range) = (backend.memory(), test_kernels(&**backend), memory.range);
    let stream = stream_of_another_backend();
    let mut bytes = vec![0; range.len as usize];
    // Never freed: a backend that takes the stream may use it at any time.
    let host = NonNull::from(Vec::leak(bytes.clone())).cast::<u8>();
    // SAFETY: the calls are to be refused. Where one is not, the case fails; the memory is freed after the device has been
    // waited for, the host's bytes are leaked, and the word is in the memory.
    let mut results = unsafe {
        vec![
            ("DeviceMemory::copy", calls.copy(range, range, stream)),
            ("DeviceMemory::fill", calls.fill(range, 1, stream)),
            ("DeviceMemory::write", calls.write(range, &bytes, stream)),
            ("DeviceMemory::read", calls.read(range, &mut bytes, stream)),
            ("TestKernels::add_f32", kernels.add_f32(range, 1.0, stream)),
            ("DeviceMemory::copy_to_host", calls.copy_to_host(host, range, stream)),
            ("DeviceMemory::copy_from_host", calls.copy_from_host(range, host, stream)),
        ]
    };
    results.push(("DeviceMemory::synchronize", calls.synchronize(stream)));
    let capabilities = backend.capabilities(range.device)?;
    if capabilities.ipc_events {
        let event = backend.create_event(range.device)?;
        results.push(("DeviceEvent::record", event.record(stream)));
        results.push(("DeviceEvent::wait_on", event.wait_on(stream)));
    }
    if let Some(timelines) = backend.timelines().filter(|_| capabilities.timelines) {
        // SAFETY: as above.
        results
            .push(("DeviceTimelines::write_value", unsafe { timelines.write_value(range.ptr, 1, stream) }));
        // SAFETY: as above.
        results.push(("DeviceTimelines::wait_value", unsafe { timelines.wait_value(range.ptr, 0, stream) }));
    }
    Ok(results)
}

/// Submits setting every byte of memory that this process may only read.
///
/// # Errors
///
/// The backend's, which is what the caller hopes for.
pub fn fill_mapping(
    backend: &dyn DeviceIpc,
    mapping: &device_ipc_core::Mapping,
    byte: u8,
    stream: &impl AsStream,
) -> Result<()> {
    // SAFETY: the mapping is held over the call and the synchronisation that follows; what must not be written is the
    // point.
    unsafe { backend.memory().fill(mapping.range(), byte, stream.as_stream()) }?;
    backend.memory().synchronize(stream.as_stream())
}

/// Reads memory of this process by its address.
///
/// `range` must lie in allocations that the caller keeps.
pub fn read(backend: &dyn DeviceIpc, range: DeviceRange, stream: &impl AsStream) -> Result<Vec<u8>> {
    let mut bytes = vec![0; range.len as usize];
    // SAFETY: callers are cases, which hold the export or the buffer that keeps the range allocated.
    unsafe { backend.memory().read(range, &mut bytes, stream.as_stream()) }?;
    Ok(bytes)
}

/// Closes everything of an exporter that has died.
pub fn close_mappings_of(exporter: &device_ipc_core::ProcessIdentity) -> Result<usize> {
    // SAFETY: the case that calls this submits no work that uses the memory afterwards.
    unsafe { device_ipc_core::close_mappings_of(exporter) }
}
