//! A copy within the exporting process.

#![allow(unsafe_code, reason = "copies between a region that a lease keeps and a new buffer")]

use std::sync::Arc;

use super::Chunks;
use crate::backend::{Buffer, DeviceIpc, MemoryUse};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;

/// Bytes that go through the host at a time.
const THROUGH_THE_HOST: u64 = 8 << 20;

/// Copies a region of this process to a new buffer, and waits until that is complete. The caller keeps the region.
pub(crate) fn copy_within(
    backend: &Arc<dyn DeviceIpc>,
    region: DeviceRange,
    device: DeviceOrdinal,
) -> Result<Buffer> {
    let memory = backend.memory();
    let buffer = Buffer::allocate(Arc::clone(backend), device, region.len, MemoryUse::new())?;
    let to = memory.create_stream(device)?;
    if backend.peer_access(device, region.device)? {
        // SAFETY: the caller keeps the region, and the buffer is new; both until the stream has been waited for.
        let copied = unsafe { memory.copy(buffer.range(), region, to.as_borrowed()) };
        memory.synchronize(to.as_borrowed())?;
        copied?;
        return Ok(buffer);
    }
    let from = memory.create_stream(region.device)?;
    let chunks = Chunks::new(region.len, THROUGH_THE_HOST);
    for chunk in 0..chunks.count() {
        let mut bytes = vec![0_u8; chunks.len(chunk) as usize];
        // SAFETY: as above; a read waits, and a write takes the bytes during the call.
        unsafe {
            memory.read(chunks.part(chunk, region)?, &mut bytes, from.as_borrowed())?;
            memory.write(chunks.part(chunk, buffer.range())?, &bytes, to.as_borrowed())?;
        }
    }
    memory.synchronize(to.as_borrowed())?;
    Ok(buffer)
}
