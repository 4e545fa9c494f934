//! The few calls that the library cannot make safe: addresses on trust, bare ranges.

#![allow(unsafe_code, reason = "the suite hands bad addresses to the library on purpose")]

use device_ipc_core::{
    AsStream, BorrowedStream, DeviceIpc, DeviceOrdinal, DeviceRange, OwnedRegion, Region, Result,
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

/// A stream that claims to be another backend's: for calls that are to refuse it before they use it.
pub fn stream_of_another_backend() -> BorrowedStream<'static> {
    // SAFETY: the value is only given to calls that check the backend's name first; where one does not, the process
    // that finds this out is the case's own.
    unsafe { BorrowedStream::from_raw("another-backend", DeviceOrdinal::new(0), 0) }
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
    ///
    /// # Errors
    ///
    /// The backend's.
    pub fn allocate(backend: &'a dyn DeviceIpc, device: DeviceOrdinal, bytes: u64) -> Result<Self> {
        Ok(Self { backend, range: backend.memory().allocate(device, bytes)? })
    }

    /// Submits setting every byte of a part.
    ///
    /// # Errors
    ///
    /// The backend's.
    pub fn fill(&self, part: DeviceRange, byte: u8, stream: &impl AsStream) -> Result<()> {
        assert!(self.range.contains(&part), "a case may only touch its own memory");
        // SAFETY: the part is allocated until the drop, which waits for the device.
        unsafe { self.backend.memory().fill(part, byte, stream.as_stream()) }
    }

    /// Submits a kernel that adds to every float of a part.
    ///
    /// # Errors
    ///
    /// The backend's.
    pub fn add(&self, part: DeviceRange, value: f32, stream: &impl AsStream) -> Result<()> {
        assert!(self.range.contains(&part), "a case may only touch its own memory");
        // SAFETY: as in `fill`.
        unsafe { self.backend.memory().add_f32(part, value, stream.as_stream()) }
    }

    /// Submits writing host bytes, of whatever length.
    ///
    /// # Errors
    ///
    /// The backend's.
    pub fn write(&self, part: DeviceRange, bytes: &[u8], stream: &impl AsStream) -> Result<()> {
        assert!(self.range.contains(&part), "a case may only touch its own memory");
        // SAFETY: as in `fill`; another length is to be refused.
        unsafe { self.backend.memory().write(part, bytes, stream.as_stream()) }
    }

    /// Submits a copy from other bare memory, of whatever length.
    ///
    /// # Errors
    ///
    /// The backend's.
    pub fn copy_from(&self, source: &Bare<'_>, stream: &impl AsStream) -> Result<()> {
        // SAFETY: as in `fill`, for both; another length is to be refused.
        unsafe { self.backend.memory().copy(self.range, source.range, stream.as_stream()) }
    }

    /// Reads a part.
    ///
    /// # Errors
    ///
    /// The backend's.
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
///
/// # Errors
///
/// The backend's.
pub fn read(backend: &dyn DeviceIpc, range: DeviceRange, stream: &impl AsStream) -> Result<Vec<u8>> {
    let mut bytes = vec![0; range.len as usize];
    // SAFETY: callers are cases, which hold the export or the buffer that keeps the range allocated.
    unsafe { backend.memory().read(range, &mut bytes, stream.as_stream()) }?;
    Ok(bytes)
}

/// Closes everything of an exporter that has died.
///
/// # Errors
///
/// The library's.
pub fn close_mappings_of(exporter: &device_ipc_core::ProcessIdentity) -> Result<usize> {
    // SAFETY: the case that calls this submits no work that uses the memory afterwards.
    unsafe { device_ipc_core::close_mappings_of(exporter) }
}
