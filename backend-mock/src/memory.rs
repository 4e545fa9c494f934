//! Device memory and test kernels of the engine.

#![allow(
    unsafe_code,
    reason = "implements a trait whose methods are unsafe; the engine checks every range itself"
)]

use std::ptr::NonNull;
use std::sync::Arc;

use device_ipc_core::backend::{
    DeviceMemory, DeviceStream, HandleKind, Lifetime, MemoryInfo, TestKernels, check_copy_lengths,
};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};
use device_ipc_mock_engine::{self as engine_crate, Address, Machine};

use crate::errors::{engine, unknown_kind, unsupported};
use crate::host_pages::{HostPages, address_of};
use crate::profile::Kinds;
use crate::stream::{MockStream, stream_of};

/// The device memory of the engine.
#[derive(Debug)]
pub(crate) struct MockMemory {
    pub(crate) machine: Arc<Machine>,
    pub(crate) kinds: Arc<Kinds>,
    /// `None` with `pinned=off`.
    pub(crate) pinned: Option<Arc<HostPages>>,
}

impl MockMemory {
    fn pinned(&self) -> Result<&HostPages> {
        let why = "the machine is configured with pinned=off";
        self.pinned
            .as_deref()
            .ok_or_else(|| unsupported("copy asynchronously between device and host memory", why))
    }
}

fn address(range: DeviceRange) -> Address {
    Address::new(range.ptr.get())
}

impl DeviceMemory for MockMemory {
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        self.allocate_as(device, bytes, self.kinds.first().info.kind)
    }

    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange> {
        let known = self.kinds.get(kind).ok_or_else(|| unknown_kind(kind, &self.kinds))?;
        self.machine.peer_access(device.index(), device.index()).map_err(engine("allocate"))?;
        if bytes == 0 {
            return Err(Error::InvalidRegion("cannot allocate 0 bytes".into()));
        }
        if let Some(why) = known.unavailable {
            return Err(unsupported(format!("allocate memory for handles of kind {}", known.info.name), why));
        }
        let whole = bytes.checked_next_multiple_of(known.granularity).unwrap_or(bytes);
        let lifetime = match known.info.lifetime {
            Lifetime::Pins => engine_crate::Lifetime::Pinning,
            Lifetime::Revokes => engine_crate::Lifetime::Revoking,
        };
        let base = self.machine.allocate_with(device.index(), whole, known.alignment(whole), lifetime);
        let base = base.map_err(engine("allocate"))?.get();
        self.kinds.allocated(base, kind);
        Ok(DeviceRange::new(device, DevicePtr::new(base), bytes))
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<()> {
        // The engine waits only for the device of the memory, and streams of other devices may use the memory.
        self.machine.wait_for_streams().map_err(engine("wait_for_streams"))?;
        let kind = self.kinds.of_allocation(range.ptr.get()).info.kind;
        self.kinds.freed(range.ptr.get());
        let freed = self.machine.free(address(range)).map_err(engine("free"));
        if freed.is_err() {
            self.kinds.allocated(range.ptr.get(), kind);
        }
        freed
    }

    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        check_copy_lengths(dst.len, src.len)?;
        if dst.len == 0 {
            return stream_of(stream).map(drop);
        }
        self.machine.copy(address(dst), address(src), dst.len, stream_of(stream)?).map_err(engine("copy"))
    }

    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()> {
        if dst.len == 0 {
            return stream_of(stream).map(drop);
        }
        self.machine.fill(address(dst), dst.len, byte, stream_of(stream)?).map_err(engine("fill"))
    }

    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()> {
        check_copy_lengths(dst.len, bytes.len() as u64)?;
        if bytes.is_empty() {
            return stream_of(stream).map(drop);
        }
        self.machine
            .write_from_host(address(dst), bytes, stream_of(stream)?)
            .map_err(engine("write_from_host"))
    }

    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()> {
        check_copy_lengths(bytes.len() as u64, src.len)?;
        if bytes.is_empty() {
            return self.synchronize(stream);
        }
        let read = self.machine.read_to_host(address(src), src.len, stream_of(stream)?);
        bytes.copy_from_slice(&read.map_err(engine("read_to_host"))?);
        Ok(())
    }

    fn synchronize(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.machine.synchronize(stream_of(stream)?).map_err(engine("synchronize"))
    }

    fn is_complete(&self, stream: BorrowedStream<'_>) -> Result<bool> {
        self.machine.query(stream_of(stream)?).map_err(engine("query"))
    }

    fn create_stream(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceStream>> {
        let stream = self.machine.create_stream(device.index()).map_err(engine("create_stream"))?;
        Ok(Box::new(MockStream { machine: Arc::clone(&self.machine), stream, device }))
    }

    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo> {
        let (free_bytes, total_bytes) =
            self.machine.memory_info(device.index()).map_err(engine("memory_info"))?;
        Ok(MemoryInfo { free_bytes, total_bytes })
    }

    unsafe fn pin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.pinned()?.register(device, pages, len) }.map(drop)
    }

    unsafe fn unpin_host(&self, _device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        self.pinned()?.unregister(pages)
    }

    unsafe fn copy_to_host(
        &self,
        dst: NonNull<u8>,
        src: DeviceRange,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let stream = stream_of(stream)?;
        self.machine.copy(address_of(dst), address(src), src.len, stream).map_err(engine("copy"))
    }

    unsafe fn copy_from_host(
        &self,
        dst: DeviceRange,
        src: NonNull<u8>,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let stream = stream_of(stream)?;
        self.machine.copy(address(dst), address_of(src), dst.len, stream).map_err(engine("copy"))
    }
}

impl TestKernels for MockMemory {
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()> {
        if !range.len.is_multiple_of(4) || !range.ptr.get().is_multiple_of(4) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} are not whole, aligned 32-bit floats",
                range.len, range.ptr
            )));
        }
        if range.len == 0 {
            return stream_of(stream).map(drop);
        }
        self.machine
            .add_f32(address(range), range.len / 4, value, stream_of(stream)?)
            .map_err(engine("add_f32"))
    }

    fn host_function(&self, function: Box<dyn FnOnce() + Send>, stream: BorrowedStream<'_>) -> Result<()> {
        self.machine.host_fn(function, stream_of(stream)?).map_err(engine("host_function"))
    }
}
