//! Plain device memory ("Device Memory Malloc and Free", "Memory Copy and Set").
//!
//! ACL has no kernels that are there without a compiler, so the one computation that the suite needs runs on the host, in
//! its place on the stream: the bytes come, a host function adds, the bytes go back.

use std::ffi::c_void;
use std::thread;
use std::time::Duration;

use device_ipc_core::{
    BorrowedStream, DeviceIpc, DeviceMemory, DeviceOrdinal, DeviceRange, DeviceStream, Error, HandleKind,
    MemoryInfo, Result,
};

use crate::NAME;
use crate::backend::AscendBackend;
use crate::bindings::*;
use crate::copies::Target;
use crate::driver::{Driver, call};
use crate::kinds::{KEY, SHAREABLE};
use crate::staging::LARGEST;
use crate::stream::AscendStream;

impl DeviceMemory for AscendBackend {
    /// Rounds up to whole pages of 2 MiB. The memory is shared by its [key](KEY), unless shareable handles were asked for
    /// ([`LoadOptions::allocates`](crate::LoadOptions::allocates)).
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        self.allocate_as(device, bytes, self.driver().allocates)
    }

    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange> {
        match kind {
            KEY => self.driver().allocate_pages(device, bytes),
            SHAREABLE => self.driver().allocate_physical(device, bytes),
            other => Err(Error::Unsupported {
                backend: NAME,
                what: format!("allocate memory for handles of kind {}", other.0),
                why: format!("it knows kinds {} (key) and {} (shareable handle)", KEY.0, SHAREABLE.0),
            }),
        }
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<()> {
        let driver = self.driver();
        let _current = driver.enter(range.device)?;
        let Some(allocation) = driver.allocations.remove(range.ptr) else {
            return Err(Error::InvalidRegion(format!("{} is not memory of this backend's", range.ptr)));
        };
        // Submitted work may still use the memory, on any device; aclrtFree and aclrtUnmapMem wait for nothing.
        for device in driver.devices.iter().filter(|device| device.context.get().is_some()) {
            if let Err(error) = self.synchronize_device(device.info.ordinal) {
                // Of the work, or of a device that is lost: neither uses the memory any longer.
                tracing::debug!(%error, device = %device.info.ordinal, "waited for a device before a free");
            }
        }
        // SAFETY: the range is of `allocate_as`, and no work uses it any longer.
        unsafe { driver.free(allocation) }
    }

    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        same_length(dst.len, src.len)?;
        if dst.len == 0 {
            return Ok(());
        }
        for range in [dst, src] {
            driver.open_up(range, stream.device())?;
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

    /// Returns at once for up to 64 MiB; a longer write waits for the stream.
    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        same_length(dst.len, bytes.len() as u64)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = driver.enter(stream.device())?;
        let target = Target::of(dst, stream);
        for (index, part) in bytes.chunks(LARGEST).enumerate() {
            let mut staged = driver.stage(target, part.len(), stream)?;
            staged.host.copy_from(part);
            // SAFETY: the range stays mapped until the copy has finished, as the caller promised.
            let copied =
                unsafe { driver.copy_from_host(target.offset(index * LARGEST), &staged, part.len(), raw) };
            let returned = driver.unstage(staged, stream, raw);
            copied.and(returned)?;
            if bytes.len() > LARGEST {
                driver.synchronize_stream(raw)?;
            }
        }
        Ok(())
    }

    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        same_length(bytes.len() as u64, src.len)?;
        if bytes.is_empty() {
            return self.synchronize(stream);
        }
        let _current = driver.enter(stream.device())?;
        let target = Target::of(src, stream);
        for (index, part) in bytes.chunks_mut(LARGEST).enumerate() {
            let staged = driver.stage(target, part.len(), stream)?;
            // SAFETY: the range stays mapped, as the caller promised.
            let copied =
                unsafe { driver.copy_to_host(target.offset(index * LARGEST), &staged, part.len(), raw) };
            let waited = copied.and_then(|()| driver.synchronize_stream(raw));
            if waited.is_ok() {
                staged.host.copy_to(part);
            }
            let returned = driver.unstage(staged, stream, raw);
            waited.and(returned)?;
        }
        Ok(())
    }

    /// On the host, in its place on the stream; where the runtime has no `aclrtLaunchHostFunc`, the
    /// call waits for the stream instead.
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        if !range.len.is_multiple_of(4) || !range.ptr.get().is_multiple_of(4) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} are not whole, aligned 32-bit floats",
                range.len, range.ptr
            )));
        }
        if range.len == 0 {
            return Ok(());
        }
        let _current = driver.enter(stream.device())?;
        let target = Target::of(range, stream);
        let most = range.len.min(LARGEST as u64) as usize;
        // One buffer for all parts: the stream is done with one before it begins the next.
        let staged = driver.stage(target, most, stream)?;
        let mut outcome = Ok(());
        let mut done = 0;
        while outcome.is_ok() && done < range.len {
            let len = (range.len - done).min(most as u64) as usize;
            let part = target.offset(done as usize);
            let sum = Sum { address: staged.host.address() as usize, count: len / 4, value };
            // SAFETY: the range stays mapped until the work has finished, as the caller promised.
            outcome = unsafe { driver.copy_to_host(part, &staged, len, raw) }
                .and_then(|()| driver.then_on_host(raw, sum, Sum::add))
                // SAFETY: as above.
                .and_then(|()| unsafe { driver.copy_from_host(part, &staged, len, raw) });
            done += len as u64;
        }
        let returned = driver.unstage(staged, stream, raw);
        outcome.and(returned)
    }

    /// By a host function. The runtime has one thread for those of a device, so that the delays of several streams, and what
    /// [`add_f32`](DeviceMemory::add_f32) does behind them, may come one after the other.
    fn delay(&self, time: Duration, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let raw = driver.stream(stream)?;
        let _current = driver.enter(stream.device())?;
        driver.then_on_host(raw, time, |time| thread::sleep(*time))
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
        // Cards without high-bandwidth memory (310P) have the other sort.
        let high_bandwidth = driver.memory_of(aclrtMemAttr::ACL_HBM_MEM);
        match high_bandwidth {
            Ok(MemoryInfo { total_bytes: 0, .. }) | Err(_) => driver.memory_of(aclrtMemAttr::ACL_DDR_MEM),
            told => told,
        }
    }
}

/// Floats that wait in a staging buffer for what is to be added to them.
struct Sum {
    address: usize,
    count: usize,
    value: f32,
}

impl Sum {
    fn add(&self) {
        // SAFETY: a staging buffer, which begins at a page's begin, holds so many floats, and is nobody else's while the
        // stream is between the two copies around this function.
        let floats = unsafe { std::slice::from_raw_parts_mut(self.address as *mut f32, self.count) };
        for float in floats {
            *float += self.value;
        }
    }
}

impl Driver {
    fn synchronize_stream(&self, stream: aclrtStream) -> Result<()> {
        // SAFETY: the stream lives, as `BorrowedStream` promises.
        self.check("aclrtSynchronizeStream", unsafe { call!(self, aclrtSynchronizeStream(stream)) })
    }

    /// Has `function` run with `argument` on the host when the stream gets there, before it goes on. Where the runtime
    /// cannot, waits for the stream and runs it here. The function calls nothing of ACL's, which forbids it.
    fn then_on_host<T: Send + 'static>(
        &self,
        stream: aclrtStream,
        argument: T,
        function: fn(&T),
    ) -> Result<()> {
        extern "C" fn run<T>(argument: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below for this one call.
            let boxed = unsafe { Box::from_raw(argument.cast::<(T, fn(&T))>()) };
            boxed.1(&boxed.0);
        }
        let Ok(launch) = &self.acl.aclrtLaunchHostFunc else {
            self.synchronize_stream(stream)?;
            function(&argument);
            return Ok(());
        };
        let boxed = Box::into_raw(Box::new((argument, function)));
        // SAFETY: the function takes the box back when it is called; a stream that fails before leaves it.
        let status = unsafe { launch(stream, Some(run::<T>), boxed.cast()) };
        if status != ACL_SUCCESS {
            let error = self.error("aclrtLaunchHostFunc", status, "");
            // SAFETY: the call has failed, so nobody else has the box.
            drop(unsafe { Box::from_raw(boxed) });
            return Err(error);
        }
        Ok(())
    }

    /// Of the device whose context is current.
    fn memory_of(&self, sort: aclrtMemAttr) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        let status = unsafe { call!(self, aclrtGetMemInfo(sort, &raw mut free, &raw mut total)) };
        self.check("aclrtGetMemInfo", status)?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }
}

fn same_length(dst: u64, src: u64) -> Result<()> {
    if dst == src {
        return Ok(());
    }
    Err(Error::InvalidRegion(format!(
        "{src} bytes do not fit a range of {dst} bytes: the lengths must be the same"
    )))
}
