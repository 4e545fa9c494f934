//! The calls of the CUDA driver, through cudarc.
//!
//! cudarc returns the status as an exhaustive enum, which is undefined behaviour for a code that it does not know. The library
//! therefore has its own bindings; a benchmark runs on known drivers.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail, ensure};
use cudarc::driver::sys;
use device_ipc::{BorrowedStream, DeviceRange};

use super::{Exchange, RawExport, RawHandle, RawMapping, RawSide};

/// The primary context of a device, as a number, because any thread may use the handle.
type Context = usize;

/// The CUDA driver, with the retained primary contexts.
pub(super) struct CudaDriver {
    contexts: Mutex<HashMap<u32, Context>>,
}

impl CudaDriver {
    /// Loads the driver from the search path of the dynamic linker.
    pub(super) fn load() -> Result<Self> {
        // SAFETY: searches for the library and loads it.
        let present = unsafe { sys::is_culib_present() };
        ensure!(
            present,
            "libcuda.so.1 not found by the dynamic linker, which the raw calls require; set LD_LIBRARY_PATH to its directory"
        );
        // SAFETY: the only argument is the flags, which must be 0.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        Ok(Self { contexts: Mutex::default() })
    }

    fn context(&self, device: u32) -> Result<Context> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = contexts.get(&device) {
            return Ok(*known);
        }
        let (mut handle, mut context) = (0, ptr::null_mut());
        // SAFETY: both write one value; the context is never released.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut handle, device as i32))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, handle))?;
        }
        contexts.insert(device, context.expose_provenance());
        Ok(context.expose_provenance())
    }
}

impl RawSide for CudaDriver {
    fn name(&self) -> &'static str {
        "the driver's own calls"
    }

    fn enter(&self, device: u32) -> Result<()> {
        let context = ptr::with_exposed_provenance_mut(self.context(device)?);
        // SAFETY: a primary context that is never released.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
    }

    fn export(&self, range: DeviceRange) -> Result<RawExport> {
        let (mut base, mut size) = (0, 0);
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes two numbers and the handle; the row keeps the memory allocated.
        unsafe {
            let found = sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, range.ptr.get());
            check("cuMemGetAddressRange", found)?;
            check("cuIpcGetMemHandle", sys::cuIpcGetMemHandle(&raw mut handle, base))?;
        }
        let bytes = handle.reserved.map(|byte| byte as u8).to_vec();
        let handle =
            RawHandle { kind: 0, bytes, size: size as u64, generation: None, home: range.device.get() };
        Ok(RawExport { handle, exported: None })
    }

    fn open(&self, handle: &RawHandle, _device: u32) -> Result<RawMapping> {
        ensure!(handle.bytes.len() == 64, "invalid handle: a handle of the driver has 64 B");
        let mut reserved = [0; 64];
        for (to, from) in reserved.iter_mut().zip(&handle.bytes) {
            *to = *from as core::ffi::c_char;
        }
        let mut address = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: writes one address; an invalid handle is an error.
        let status =
            unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, sys::CUipcMemHandle { reserved }, flags) };
        check("cuIpcOpenMemHandle", status)?;
        Ok(RawMapping { address, opened: None })
    }

    fn close(&self, mapping: RawMapping) -> Result<()> {
        // SAFETY: opened by `open`, and no longer in use.
        check("cuIpcCloseMemHandle", unsafe { sys::cuIpcCloseMemHandle(mapping.address) })
    }

    fn exchangeable(&self, device: u32, bytes: u64) -> Result<Option<Box<dyn Exchange>>> {
        self.enter(device)?;
        Ok(Some(Box::new(Blocks::new(device, bytes)?)))
    }

    unsafe fn register(&self, page: NonNull<u8>, bytes: usize, device: u32) -> Result<u64> {
        self.enter(device)?;
        let host = page.as_ptr().cast();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let mut address = 0;
        // SAFETY: the page stays mapped, as the caller guarantees; the second call writes one address.
        unsafe {
            check("cuMemHostRegister", sys::cuMemHostRegister_v2(host, bytes, flags))?;
            let found = sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0);
            check("cuMemHostGetDevicePointer", found)?;
        }
        Ok(address)
    }

    unsafe fn write_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()> {
        // SAFETY: as the caller guarantees; the stream lives, as `BorrowedStream` promises.
        let status = unsafe { sys::cuStreamWriteValue64_v2(raw(stream), word, value, 0) };
        check("cuStreamWriteValue64", status)
    }

    unsafe fn wait_value(&self, stream: BorrowedStream<'_>, word: u64, value: u64) -> Result<()> {
        let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: as for `write_value`.
        let status = unsafe { sys::cuStreamWaitValue64_v2(raw(stream), word, value, at_least) };
        check("cuStreamWaitValue64", status)
    }

    unsafe fn copy_peer(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        let [to, from] = [dst.device, src.device].map(|device| self.context(device.get()));
        let (to, from) = (ptr::with_exposed_provenance_mut(to?), ptr::with_exposed_provenance_mut(from?));
        self.enter(dst.device.get())?;
        // SAFETY: both contexts are never released, and the destination's is current; the ranges stay allocated, as the caller
        // promised.
        unsafe {
            match sys::cuCtxEnablePeerAccess(from, 0) {
                sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
                status => check("cuCtxEnablePeerAccess", status)?,
            }
            let bytes = src.len as usize;
            let copied = sys::cuMemcpyPeerAsync(dst.ptr.get(), to, src.ptr.get(), from, bytes, raw(stream));
            check("cuMemcpyPeerAsync", copied)
        }
    }
}

fn raw(stream: BorrowedStream<'_>) -> sys::CUstream {
    ptr::with_exposed_provenance_mut(stream.raw() as usize)
}

fn check(call: &str, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    bail!("{call} failed with {status:?}")
}

/// Two exported blocks of virtual memory, of which one is imported and mapped at `address`.
struct Blocks {
    blocks: [u64; 2],
    exported: Vec<OwnedFd>,
    address: u64,
    bytes: usize,
    access: sys::CUmemAccessDesc,
    mapped: usize,
    /// The import of the mapped block.
    imported: u64,
}

const FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl Blocks {
    fn new(device: u32, bytes: u64) -> Result<Self> {
        ensure!(device == 0, "the bare calls are for device 0, whose location is all zeros");
        // SAFETY: structures of numbers; all zeros are device 0 without flags. The fields of a location differ between the
        // versions of CUDA.
        let (mut properties, mut access) =
            unsafe { std::mem::zeroed::<(sys::CUmemAllocationProp, sys::CUmemAccessDesc)>() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.requestedHandleTypes = FD;
        access.location = properties.location;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let bytes = bytes as usize;
        let (mut blocks, mut exported, mut address) = ([0; 2], Vec::new(), 0);
        for block in &mut blocks {
            let mut fd = -1;
            // SAFETY: each call writes one value. What a failed call leaves ends with the process.
            unsafe {
                check("cuMemCreate", sys::cuMemCreate(block, bytes, &raw const properties, 0))?;
                let found = sys::cuMemExportToShareableHandle((&raw mut fd).cast(), *block, FD, 0);
                check("cuMemExportToShareableHandle", found)?;
                exported.push(OwnedFd::from_raw_fd(fd));
            }
        }
        // SAFETY: writes one address.
        check("cuMemAddressReserve", unsafe { sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0) })?;
        let mut made = Self { blocks, exported, address, bytes, access, mapped: 0, imported: 0 };
        made.imported = made.import()?;
        made.map()?;
        Ok(made)
    }

    fn import(&self) -> Result<u64> {
        let fd = ptr::without_provenance_mut(self.exported[self.mapped].as_raw_fd() as usize);
        let mut imported = 0;
        // SAFETY: the descriptor is open; the call writes one handle.
        let found = unsafe { sys::cuMemImportFromShareableHandle(&raw mut imported, fd, FD) };
        check("cuMemImportFromShareableHandle", found)?;
        Ok(imported)
    }

    fn map(&self) -> Result<()> {
        let Self { address, bytes, .. } = *self;
        // SAFETY: nothing is mapped at the reserved address.
        unsafe {
            check("cuMemMap", sys::cuMemMap(address, bytes, 0, self.imported, 0))?;
            check("cuMemSetAccess", sys::cuMemSetAccess(address, bytes, &raw const self.access, 1))
        }
    }
}

impl Exchange for Blocks {
    fn exchange(&mut self) -> Result<()> {
        self.mapped = 1 - self.mapped;
        let next = self.import()?;
        // SAFETY: mapped by `map`, and no work uses it.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.address, self.bytes) })?;
        let last = std::mem::replace(&mut self.imported, next);
        self.map()?;
        // SAFETY: the import that was mapped before.
        check("cuMemRelease", unsafe { sys::cuMemRelease(last) })
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and no work uses them.
        unsafe {
            let _ = sys::cuMemUnmap(self.address, self.bytes);
            let _ = sys::cuMemAddressFree(self.address, self.bytes);
            for block in self.blocks.into_iter().chain([self.imported]) {
                let _ = sys::cuMemRelease(block);
            }
        }
    }
}
