//! Plain device memory ("Device Memory Malloc and Free", "Memory Copy and Set").

use device_ipc_core::backend::{
    DeviceIpc, DeviceMemory, DeviceStream, HandleKind, MemoryInfo, check_copy_lengths,
};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DeviceRange, Error, Result};

use super::ascend::AscendBackend;
use crate::bindings::*;
use crate::library::{NAME, call};
use crate::memory::copies::Target;
use crate::memory::kind::{KEY, SHAREABLE};
use crate::objects::driver::Driver;
use crate::objects::staging::MAX_STAGED_BYTES;
use crate::objects::stream::AscendStream;

impl DeviceMemory for AscendBackend {
    /// Allocates whole pages of 2 MiB, for handles of the default kind: [`KEY`], unless set by
    /// [`LoadOptions::allocates`](crate::LoadOptions::allocates).
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        self.allocate_as(device, bytes, self.default_kind)
    }

    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange> {
        match kind {
            KEY => self.memory.allocate_pages(device, bytes),
            SHAREABLE => self.memory.allocate_physical(device, bytes),
            other => Err(Error::Unsupported {
                backend: NAME,
                what: format!("allocate memory for handles of kind {}", other.0),
                why: format!(
                    "this version supports kinds {} (key) and {} (shareable handle)",
                    KEY.0, SHAREABLE.0
                ),
            }),
        }
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<()> {
        let driver = self.driver();
        let _current = driver.enter(range.device)?;
        let allocation = self.memory.take_allocation(range)?;
        // Submitted work on any device may still use the memory; aclrtFree and aclrtUnmapMem do not wait for it.
        for device in driver.devices.iter().filter(|device| device.context.get().is_some()) {
            if let Err(error) = self.synchronize_device(device.info.ordinal) {
                // The work has failed or the device is lost: neither uses the memory any longer.
                tracing::debug!(target: crate::LOG, %error, device = %device.info.ordinal, "cannot wait for a device before a free");
            }
        }
        // SAFETY: the range is of `allocate_as`, and no work uses it any longer.
        unsafe { self.memory.free_allocation(allocation) }
    }

    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        check_copy_lengths(dst.len, src.len)?;
        if dst.len == 0 {
            return Ok(());
        }
        for range in [dst, src] {
            self.memory.grant_access(range, stream.device())?;
        }
        let _current = driver.enter(stream.device())?;
        // SAFETY: both ranges stay mapped until the copy has finished, as the caller promised.
        unsafe { driver.copy_between(dst.ptr.get(), src.ptr.get(), dst.len as usize, raw) }
    }

    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        if dst.len == 0 {
            return Ok(());
        }
        let _current = driver.enter(stream.device())?;
        // SAFETY: the range stays mapped until the work has finished, as the caller promised.
        unsafe {
            if Target::of(dst, stream).is_remote() {
                driver.fill_remote(dst, byte, stream, raw)
            } else {
                driver.set_async(dst.ptr.get(), byte, dst.len as usize, raw)
            }
        }
    }

    /// Submits a write from host memory. Returns at once for up to 64 MiB; a longer write waits for the stream.
    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        check_copy_lengths(dst.len, bytes.len() as u64)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = driver.enter(stream.device())?;
        let target = Target::of(dst, stream);
        for (index, part) in bytes.chunks(MAX_STAGED_BYTES).enumerate() {
            let mut staged = driver.stage(target, part.len(), stream)?;
            staged.host.copy_from(part);
            // SAFETY: the range stays mapped until the copy has finished, as the caller promised.
            let copied = unsafe {
                driver.copy_from_host(target.offset(index * MAX_STAGED_BYTES), &staged, part.len(), raw)
            };
            let returned = driver.unstage(staged, stream, raw);
            copied.and(returned)?;
            if bytes.len() > MAX_STAGED_BYTES {
                driver.synchronize_stream(raw)?;
            }
        }
        Ok(())
    }

    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        check_copy_lengths(bytes.len() as u64, src.len)?;
        if bytes.is_empty() {
            return self.synchronize(stream);
        }
        let _current = driver.enter(stream.device())?;
        let target = Target::of(src, stream);
        for (index, part) in bytes.chunks_mut(MAX_STAGED_BYTES).enumerate() {
            let staged = driver.stage(target, part.len(), stream)?;
            // SAFETY: the range stays mapped, as the caller promised.
            let copied = unsafe {
                driver.copy_to_host(target.offset(index * MAX_STAGED_BYTES), &staged, part.len(), raw)
            };
            let waited = copied.and_then(|()| driver.synchronize_stream(raw));
            if waited.is_ok() {
                staged.host.copy_to(part);
            }
            let returned = driver.unstage(staged, stream, raw);
            waited.and(returned)?;
        }
        Ok(())
    }

    fn synchronize(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        let _current = driver.enter(stream.device())?;
        driver.synchronize_stream(raw)
    }

    fn create_stream(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceStream>> {
        Ok(Box::new(AscendStream::create(self.driver(), device)?))
    }

    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo> {
        let driver = self.driver();
        let _current = driver.enter(device)?;
        // Cards without high-bandwidth memory (310P) have DDR memory.
        let high_bandwidth = driver.memory_of(aclrtMemAttr::ACL_HBM_MEM);
        match high_bandwidth {
            Ok(MemoryInfo { total_bytes: 0, .. }) | Err(_) => driver.memory_of(aclrtMemAttr::ACL_DDR_MEM),
            reported => reported,
        }
    }
}

impl Driver {
    /// Returns the free and total memory of the device whose context is current.
    fn memory_of(&self, sort: aclrtMemAttr) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        let status = unsafe { call!(self, aclrtGetMemInfo(sort, &raw mut free, &raw mut total)) };
        self.check("aclrtGetMemInfo", status)?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }
}
