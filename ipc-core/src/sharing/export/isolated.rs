//! Memory that the library allocates in place of the caller's: copies without neighbours, and stand-ins for tensors without bytes.

#![allow(unsafe_code, reason = "copies memory while its owner and the new buffer keep both ranges")]

use crate::backend::interop::Region;
use crate::backend::stream::BorrowedStream;
use crate::backend::{Access, Buffer, MemoryUse};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::{Ipc, allocate};

/// Returns one byte that represents the memory of a tensor without elements, of a kind that permits this access. `alone`
/// requests an isolated kind, if there is one.
pub(crate) fn stand_in(ipc: &Ipc, device: DeviceOrdinal, access: Access, alone: bool) -> Result<Buffer> {
    let with_access =
        if access.is_writable() { MemoryUse::new() } else { MemoryUse::new().read_only_importers() };
    let wanted = if alone { with_access.isolated() } else { with_access };
    match allocate(ipc.backend(), device, 1, wanted) {
        // The share reports the limits of this memory.
        Err(Error::Unsupported { .. }) => allocate(ipc.backend(), device, 1, MemoryUse::new()),
        allocated => allocated,
    }
}

/// Returns an isolated copy of the region, of the same length, so that no other memory is beside it. Waits until the copy is
/// complete, after the work that `after` has to complete first.
pub(super) fn isolated_copy(ipc: &Ipc, region: Region, after: Option<BorrowedStream<'_>>) -> Result<Buffer> {
    let wanted = MemoryUse::new().isolated();
    let copy = allocate(ipc.backend(), region.range.device, region.range.len, wanted)?;
    clear_behind(ipc, copy.range())?;
    copy_and_wait(ipc, copy.range(), region.range, after)?;
    Ok(copy)
}

/// Clears the padding of an allocation, which may contain earlier data.
fn clear_behind(ipc: &Ipc, range: DeviceRange) -> Result<()> {
    let memory = ipc.backend().memory();
    let extents = ipc.backend().extents_of(range, None)?;
    let Some(last) = extents.last().map(|extent| extent.allocation) else { return Ok(()) };
    let (Some(end), Some(ptr)) = (last.end(), range.end()) else { return Ok(()) };
    let Some(len) = end.offset_from(ptr).filter(|len| *len > 0) else { return Ok(()) };
    let stream = memory.create_stream(range.device)?;
    // SAFETY: the bytes lie in the new buffer's allocation, to which nothing else refers.
    let filled = unsafe { memory.fill(DeviceRange::new(range.device, ptr, len), 0, stream.as_borrowed()) };
    memory.synchronize(stream.as_borrowed())?;
    filled
}

/// Copies on the stream, or on a new one, and waits on the host.
pub(crate) fn copy_and_wait(
    ipc: &Ipc,
    dst: DeviceRange,
    src: DeviceRange,
    stream: Option<BorrowedStream<'_>>,
) -> Result<()> {
    let memory = ipc.backend().memory();
    let own = if stream.is_none() { Some(memory.create_stream(src.device)?) } else { None };
    let Some(stream) = stream.or_else(|| own.as_ref().map(|own| own.as_borrowed())) else { return Ok(()) };
    // SAFETY: the source is kept by the caller's owner and the destination by the new buffer until the stream has been
    // waited for.
    let copied = unsafe { memory.copy(dst, src, stream) };
    memory.synchronize(stream)?;
    copied
}
