//! A copy within the exporting process.

#![allow(unsafe_code, reason = "copies between regions that a lease keeps and a new buffer")]

use std::sync::Arc;

use super::{Chunks, CopyLayout, Segments};
use crate::backend::{Buffer, DeviceIpc, MemoryUse};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::allocate;

/// Bytes that are copied through the host at a time.
const THROUGH_THE_HOST: u64 = 8 << 20;

/// Copies regions of this process to a new buffer, as the layout states, and waits until the copy is complete. The caller keeps
/// the regions.
///
/// # Errors
///
/// [`Error::InvalidRegion`] for a layout of other regions; the vendor's.
pub(crate) fn copy_within(
    backend: &Arc<dyn DeviceIpc>,
    regions: &[DeviceRange],
    layout: &CopyLayout,
    device: DeviceOrdinal,
) -> Result<Buffer> {
    let memory = backend.memory();
    let source = Segments::requested(regions, layout.requested()).map_err(Error::InvalidRegion)?;
    layout.check_shared(source.len())?;
    let buffer = allocate(backend, device, layout.buffer_bytes(), MemoryUse::new())?;
    let target = layout.segments(buffer.range())?;
    let to = memory.create_stream(device)?;
    if backend.peer_access(device, source.device())? {
        let mut end = 0;
        let copied = source.ranges().iter().try_for_each(|from| {
            let begin = end;
            end += from.len;
            target.within(begin, from.len).try_for_each(|(offset, part)| {
                let from = from.slice(offset, part.len).expect("as long as the bytes asked for");
                // SAFETY: the caller keeps the regions, and the buffer is new; both until the stream has been waited for.
                unsafe { memory.copy(part, from, to.as_borrowed()) }
            })
        });
        memory.synchronize(to.as_borrowed())?;
        copied?;
        return Ok(buffer);
    }
    let from = memory.create_stream(source.device())?;
    let chunks = Chunks::new(source.len(), THROUGH_THE_HOST);
    for chunk in 0..chunks.count() {
        let (start, len) = (chunks.start(chunk), chunks.len(chunk));
        let mut bytes = vec![0_u8; len as usize];
        for (offset, part) in source.within(start, len) {
            // SAFETY: as above; a read waits.
            unsafe {
                memory.read(part, &mut bytes[offset as usize..][..part.len as usize], from.as_borrowed())?
            };
        }
        for (offset, part) in target.within(start, len) {
            // SAFETY: as above; a write takes the bytes during the call.
            unsafe { memory.write(part, &bytes[offset as usize..][..part.len as usize], to.as_borrowed())? };
        }
    }
    memory.synchronize(to.as_borrowed())?;
    Ok(buffer)
}
