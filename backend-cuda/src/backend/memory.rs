//! Plain device memory: allocation, copies, streams ("Memory Management", `group__CUDA__MEM`).
//!
//! With unified addressing an address determines its device, so one copy call serves every pair of devices: the CUDA
//! C++ Programming Guide, "Peer-to-Peer Memory Copy". It also serves an IPC mapping on another device, whose address
//! belongs to the device that opened it.

use std::ptr::NonNull;

use device_ipc_core::backend::{
    BlockedTensors, DeviceMemory, DeviceStream, HandleKind, MemoryInfo, check_blocks, check_copy_lengths,
};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DeviceRange, Result};

use super::cuda::CudaBackend;
use crate::library::status::number;
use crate::memory::allocate;
use crate::objects::staging::MAX_STAGED_BYTES;
use crate::objects::stream::OwnedStream;

impl DeviceMemory for CudaBackend {
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        self.allocator.allocate(device, bytes, self.default_kind)
    }

    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange> {
        self.allocator.allocate(device, bytes, kind)
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.allocator.free(range) }
    }

    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        check_copy_lengths(dst.len, src.len)?;
        if dst.len == 0 {
            return Ok(());
        }
        // SAFETY: both ranges stay mapped until the copy has finished, as the caller promised.
        let status =
            unsafe { (driver.api.memcpy_async)(dst.ptr.get(), src.ptr.get(), dst.len as usize, raw) };
        driver.check("cuMemcpyAsync", status)
    }

    unsafe fn copy_blocks(
        &self,
        tensors: &[BlockedTensors],
        block_bytes: u64,
        sources: &[u32],
        destinations: &[u32],
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let (raw, _current) = self.driver().enter_with(stream)?;
        check_blocks(tensors, block_bytes, sources, destinations)?;
        // SAFETY: as the caller promised; the blocks lie in their tensors.
        unsafe {
            self.driver().launch_copy_blocks(
                tensors,
                block_bytes,
                sources,
                destinations,
                stream.device(),
                raw,
            )
        }
    }

    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        if dst.len == 0 {
            return Ok(());
        }
        // SAFETY: the range stays mapped until the work has finished, as the caller promised.
        let status = unsafe { (driver.api.memset_d8_async)(dst.ptr.get(), byte, dst.len as usize, raw) };
        driver.check("cuMemsetD8Async", status)
    }

    /// Submits a write from host memory. Returns at once for up to 64 MiB; a longer write waits for the stream.
    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        check_copy_lengths(dst.len, bytes.len() as u64)?;
        driver.refuse_capture(raw, "writing host bytes")?;
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() <= MAX_STAGED_BYTES {
            // SAFETY: the range stays mapped until the copy has finished, as the caller promised.
            return unsafe {
                driver.device(stream.device())?.staging.write(driver, dst.ptr.get(), bytes, raw)
            };
        }
        // SAFETY: the bytes are borrowed until the stream has been waited for below.
        let copied =
            unsafe { (driver.api.memcpy_htod_async)(dst.ptr.get(), bytes.as_ptr().cast(), bytes.len(), raw) };
        // SAFETY: the stream lives.
        let waited = unsafe { (driver.api.stream_synchronize)(raw) };
        driver.check("cuMemcpyHtoDAsync", copied)?;
        driver.check("cuStreamSynchronize", waited)
    }

    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        check_copy_lengths(bytes.len() as u64, src.len)?;
        driver.refuse_capture(raw, "reading bytes to the host")?;
        if bytes.is_empty() {
            return self.synchronize(stream);
        }
        let len = bytes.len();
        // SAFETY: the bytes are borrowed until the stream has been waited for below; the range stays mapped, as the
        // caller promised.
        let copied =
            unsafe { (driver.api.memcpy_dtoh_async)(bytes.as_mut_ptr().cast(), src.ptr.get(), len, raw) };
        // SAFETY: the stream lives.
        let waited = unsafe { (driver.api.stream_synchronize)(raw) };
        driver.check("cuMemcpyDtoHAsync", copied)?;
        driver.check("cuStreamSynchronize", waited)
    }

    fn synchronize(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "waiting for the stream on the host")?;
        // SAFETY: the stream lives, as `BorrowedStream` promises.
        driver.check("cuStreamSynchronize", unsafe { (driver.api.stream_synchronize)(raw) })
    }

    fn is_complete(&self, stream: BorrowedStream<'_>) -> Result<bool> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        if driver.is_capturing(raw)? {
            return Ok(false);
        }
        // SAFETY: the stream lives, as `BorrowedStream` promises.
        match unsafe { (driver.api.stream_query)(raw) } {
            number::ERROR_NOT_READY => Ok(false),
            status => driver.check("cuStreamQuery", status).map(|()| true),
        }
    }

    fn create_stream(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceStream>> {
        Ok(Box::new(OwnedStream::create(self.driver(), device)?))
    }

    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo> {
        let _current = self.driver().enter(device)?;
        allocate::info(self.driver())
    }

    unsafe fn pin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.host_pages.register(self.driver(), device, pages, len) }.map(drop)
    }

    /// Unpins host memory. Waits for streams where the driver does, as for `cuMemFree`.
    unsafe fn unpin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.host_pages.unregister(self.driver(), device, pages) }
    }

    unsafe fn copy_to_host(
        &self,
        dst: NonNull<u8>,
        src: DeviceRange,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        let (to, len) = (dst.as_ptr().cast(), src.len as usize);
        // SAFETY: source and destination stay until the copy has finished, as the caller promised.
        let status = unsafe { (driver.api.memcpy_dtoh_async)(to, src.ptr.get(), len, raw) };
        driver.check("cuMemcpyDtoHAsync", status)
    }

    unsafe fn copy_from_host(
        &self,
        dst: DeviceRange,
        src: NonNull<u8>,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let driver = self.driver();
        let (raw, _current) = driver.enter_with(stream)?;
        let (from, len) = (src.as_ptr().cast_const().cast(), dst.len as usize);
        // SAFETY: source and destination stay until the copy has finished, as the caller promised.
        let status = unsafe { (driver.api.memcpy_htod_async)(dst.ptr.get(), from, len, raw) };
        driver.check("cuMemcpyHtoDAsync", status)
    }
}
