//! Which allocations a range lies in, by which kinds of handle they can travel, and the handles.
//!
//! A file for each kind: [`legacy`], [`virtual_memory`], [`pool`], [`fabric`]. Nobody has to say what memory he has: the
//! driver knows it by the address ([`pointer`](crate::pointer)).

mod fabric;
mod legacy;
pub(crate) mod pool;
mod virtual_memory;

use device_ipc_core::{DevicePtr, DeviceRange, Error, Exported, Extent, HandleBytes, HandleKind, Result};

use crate::NAME;
use crate::api::{MEMORYTYPE_HOST, Pool};
use crate::backend::CudaBackend;
use crate::device_context;
use crate::driver::Driver;
use crate::kinds::{self, FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
use crate::layout::{HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD};
use crate::pointer::Pointer;
use crate::status::number;

/// Memory of a device, by where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemCreate`, with these types of handle.
    Virtual(u32),
    /// `cuMemAllocAsync`: of this pool, which has these types of handle.
    Pool(Pool, u32),
    /// Another process; opened here.
    Foreign,
}

impl Memory {
    /// The kinds of handle that can be made of it, the preferred first.
    ///
    /// File descriptors before fabric handles: they need no IMEX channel, and are worth nothing to who only reads them.
    const fn kinds(self) -> &'static [HandleKind] {
        const BOTH: u32 = HANDLE_TYPE_POSIX_FD | HANDLE_TYPE_FABRIC;
        match self {
            Self::Plain => &[LEGACY],
            Self::Virtual(types) => match types & BOTH {
                BOTH => &[VIRTUAL_MEMORY, FABRIC],
                HANDLE_TYPE_POSIX_FD => &[VIRTUAL_MEMORY],
                HANDLE_TYPE_FABRIC => &[FABRIC],
                _ => &[],
            },
            Self::Pool(_, types) if types & HANDLE_TYPE_POSIX_FD != 0 => &[POOL],
            Self::Pool(..) | Self::Foreign => &[],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Plain => "memory of cuMemAlloc (cudaMalloc)",
            Self::Virtual(_) => "virtual memory (cuMemCreate)",
            Self::Pool(..) => {
                "memory of a pool (cuMemAllocAsync, where cudarc's and candle's slices come from)"
            }
            Self::Foreign => "memory of another process",
        }
    }

    /// The kind of handle to make, where `stated` may ask for one of several.
    fn choose(self, ptr: DevicePtr, stated: Option<HandleKind>) -> Result<HandleKind> {
        let kinds = self.kinds();
        let Some(preferred) = kinds.first() else { return Err(self.has_no_handle(ptr)) };
        match stated {
            None => Ok(*preferred),
            Some(stated) if kinds.contains(&stated) => Ok(stated),
            Some(stated) => Err(not_shareable(
                ptr,
                self.name(),
                format!(
                    "it has no handle of kind {} ({}); ask for kind {} ({}), or allocate it as the other kind \
                     (DeviceMemory::allocate_as)",
                    stated.0,
                    kinds::name(stated),
                    preferred.0,
                    kinds::name(*preferred)
                ),
            )),
        }
    }

    fn has_no_handle(self, ptr: DevicePtr) -> Error {
        let remedy = match self {
            Self::Foreign | Self::Plain => return Error::SharedOn { ptr },
            Self::Pool(_, 0) => {
                "it is of a pool that cannot be shared, as a device's default pool and those of other processes; call \
                 device_ipc::cuda::make_pool_shareable(device) once, before anything is allocated, or allocate this with \
                 device_ipc::cuda::alloc_zeros(&stream, len) or device_ipc::cuda::clone_htod(&stream, &data), or share a \
                 copy (Ipc::share_copy)"
            }
            Self::Pool(..) => {
                "its pool was made without file descriptors; make it with handleTypes = \
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or share a copy (Ipc::share_copy)"
            }
            Self::Virtual(_) => {
                "it was created without a type of handle, or opened from another process (forward the descriptor then: \
                 Mapping::descriptor); create it with requestedHandleTypes = \
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, in PyTorch leave TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC unset or \
                 set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or share a copy (Ipc::share_copy)"
            }
        };
        not_shareable(ptr, self.name(), remedy)
    }
}

impl Driver {
    /// The allocations that `range` lies in, if handles can be made of them.
    pub(crate) fn extents_of(&self, range: DeviceRange, stated: Option<DeviceRange>) -> Result<Vec<Extent>> {
        self.device(range.device)?;
        if range.ptr.is_null() {
            return Err(Error::NotDeviceMemory { ptr: range.ptr, why: "it is the null address".into() });
        }
        let Some(end) = range.end() else {
            return Err(Error::InvalidRegion(format!(
                "{} bytes at {} leave the address space",
                range.len, range.ptr
            )));
        };
        // Addresses are known only where there is a context.
        let _current = self.enter(range.device)?;
        let (first, kind) = self.extent_at(range)?;
        let mut extents = vec![first];
        let mut reached = end_of(&first.allocation)?;
        while reached < end {
            if !matches!(kind, VIRTUAL_MEMORY | FABRIC) {
                return Err(leaves_its_allocation(range, &first.allocation));
            }
            let rest = DeviceRange::new(range.device, reached, end.get() - reached.get());
            let (next, next_kind) = self.extent_at(rest).map_err(|error| match error {
                Error::NotDeviceMemory { .. } => Error::InvalidRegion(format!(
                    "{} bytes from {} on are not mapped as a whole: nothing is mapped at {reached}",
                    range.len, range.ptr
                )),
                error => error,
            })?;
            if next_kind != kind || next.allocation.ptr != reached {
                return Err(Error::InvalidRegion(format!(
                    "{} bytes from {} on lie in memory of several kinds: {} up to {reached}, then {}; share each by \
                     itself",
                    range.len,
                    range.ptr,
                    kinds::name(kind),
                    kinds::name(next_kind)
                )));
            }
            reached = end_of(&next.allocation)?;
            extents.push(next);
        }
        check_stated(stated, &extents)?;
        Ok(extents)
    }

    /// The allocation that `range` begins in, and the kind of handle that it gets. Its device's context is current.
    fn extent_at(&self, range: DeviceRange) -> Result<(Extent, HandleKind)> {
        let ptr = range.ptr;
        let pointer = self.known(ptr)?;
        let memory = self.memory_at(ptr, &pointer)?;
        let kind = memory.choose(ptr, None)?;
        if pointer.device != range.device.get() {
            return Err(Error::InvalidRegion(format!(
                "{ptr} is memory of device {}, and device {} was stated",
                pointer.device, range.device
            )));
        }
        let allocation = self.allocation_of(range)?;
        device_context::found(allocation.ptr, memory);
        Ok((Extent { allocation, generation: pointer.generation }, kind))
    }

    fn known(&self, ptr: DevicePtr) -> Result<Pointer> {
        self.pointer(ptr)?.ok_or_else(|| Error::NotDeviceMemory {
            ptr,
            why: "CUDA does not know the address in this process: it is ordinary host memory, was freed, or came from \
                  another process as a number"
                .into(),
        })
    }

    fn memory_at(&self, ptr: DevicePtr, pointer: &Pointer) -> Result<Memory> {
        if pointer.managed {
            return Err(not_shareable(
                ptr,
                "managed memory (cuMemAllocManaged)",
                "CUDA has no handle for it; copy it to memory of cuMemAlloc (cudaMalloc) and share the copy",
            ));
        }
        if pointer.memory_type == MEMORYTYPE_HOST {
            return Err(Error::NotDeviceMemory { ptr, why: "it is page-locked host memory".into() });
        }
        Ok(if pointer.legacy {
            Memory::Plain
        } else if pointer.pool != Pool::NULL {
            Memory::Pool(pointer.pool, pointer.handle_types)
        } else if pointer.handle_types != 0 || self.is_virtual(ptr) {
            Memory::Virtual(pointer.handle_types)
        } else {
            // What is left is memory of cuIpcOpenMemHandle.
            Memory::Foreign
        })
    }

    /// Was the address mapped with `cuMemMap`? Assumed where the driver is too old to be asked.
    fn is_virtual(&self, ptr: DevicePtr) -> bool {
        let Some(api) = &self.api.virtual_memory else { return true };
        let mut handle = 0;
        // SAFETY: writes one handle; an address that no handle is mapped at is an error.
        let is_virtual = unsafe { (api.retain)(&raw mut handle, ptr.get()) } == number::SUCCESS;
        if is_virtual {
            // SAFETY: the call above gave this process a reference of its own.
            unsafe { (api.release)(handle) };
        }
        is_virtual
    }
}

impl CudaBackend {
    /// Makes a handle of an allocation.
    pub(crate) fn export_extent(&self, extent: &Extent, stated: Option<HandleKind>) -> Result<Exported> {
        let driver = self.driver();
        let ptr = extent.allocation.ptr;
        let _current = driver.enter(extent.allocation.device)?;
        let memory = match device_context::what_was_found(ptr) {
            Some(memory) => memory,
            None => driver.memory_at(ptr, &driver.known(ptr)?)?,
        };
        let kind = memory.choose(ptr, stated)?;
        let (bytes, fds) = match (kind, memory) {
            (VIRTUAL_MEMORY, _) => (Vec::new(), vec![virtual_memory::export(driver, ptr)?]),
            (POOL, Memory::Pool(pool, _)) => {
                let (bytes, fd) = self.exported_pools.export(driver, pool, ptr)?;
                (bytes, vec![fd])
            }
            (FABRIC, _) => (fabric::export(driver, ptr)?.to_vec(), Vec::new()),
            _ => (legacy::export(driver, ptr)?.to_vec(), Vec::new()),
        };
        Ok(Exported { extent: *extent, kind, bytes: HandleBytes::new(bytes), fds })
    }

    /// Takes a handle back. The driver counts no exports; a pool's file descriptor goes with the last of them.
    pub(crate) fn unexport_handle(&self, exported: &Exported) {
        if exported.kind == POOL {
            self.exported_pools.unexport(exported.bytes.as_slice());
        }
    }
}

/// What kernels of an importer reach. See [`DeviceIpc::reach`](device_ipc_core::DeviceIpc::reach).
pub(crate) fn reach(exported: &Exported) -> Option<DeviceRange> {
    match exported.kind {
        LEGACY => legacy::reach(exported.extent.allocation),
        POOL => None,
        _ => Some(exported.extent.allocation),
    }
}

/// Where an allocation ends, which the driver says to lie in the address space.
fn end_of(allocation: &DeviceRange) -> Result<DevicePtr> {
    allocation.end().filter(|end| *end > allocation.ptr).ok_or_else(|| {
        Error::InvalidRegion(format!(
            "CUDA says that the allocation at {} has {} bytes",
            allocation.ptr, allocation.len
        ))
    })
}

fn leaves_its_allocation(range: DeviceRange, allocation: &DeviceRange) -> Error {
    Error::InvalidRegion(format!(
        "{} bytes from {} on leave their allocation of {} bytes at {}",
        range.len, range.ptr, allocation.len, allocation.ptr
    ))
}

fn check_stated(stated: Option<DeviceRange>, extents: &[Extent]) -> Result<()> {
    let (Some(stated), Some(first)) = (stated, extents.first()) else { return Ok(()) };
    let len = extents.iter().map(|extent| extent.allocation.len).sum::<u64>();
    if stated.ptr == first.allocation.ptr && stated.len <= len {
        return Ok(());
    }
    Err(Error::InvalidRegion(format!(
        "the allocation was stated to be {} bytes at {}, and CUDA says that it is {len} bytes at {}",
        stated.len, stated.ptr, first.allocation.ptr
    )))
}

fn not_shareable(ptr: DevicePtr, kind: &str, remedy: impl Into<String>) -> Error {
    Error::NotShareable { ptr, kind: kind.into(), remedy: remedy.into() }
}

/// A part of the driver that is too old to have it.
pub(crate) fn too_old(what: &str, since: &str) -> Error {
    Error::Unsupported {
        backend: NAME,
        what: what.into(),
        why: format!("the driver lacks functions that came with CUDA {since}; update it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTR: DevicePtr = DevicePtr::new(0x7000_0000);

    fn chosen(memory: Memory, stated: Option<HandleKind>) -> Option<HandleKind> {
        memory.choose(PTR, stated).ok()
    }

    fn refusal(memory: Memory, stated: Option<HandleKind>) -> String {
        memory.choose(PTR, stated).unwrap_err().to_string()
    }

    #[test]
    fn memory_says_its_kind_and_file_descriptors_are_preferred() {
        let pool = Pool(0x55);
        assert_eq!(chosen(Memory::Plain, None), Some(LEGACY));
        assert_eq!(chosen(Memory::Virtual(HANDLE_TYPE_POSIX_FD), None), Some(VIRTUAL_MEMORY));
        assert_eq!(chosen(Memory::Virtual(HANDLE_TYPE_FABRIC), None), Some(FABRIC));
        let both = Memory::Virtual(HANDLE_TYPE_POSIX_FD | HANDLE_TYPE_FABRIC);
        assert_eq!(chosen(both, None), Some(VIRTUAL_MEMORY));
        assert_eq!(chosen(both, Some(FABRIC)), Some(FABRIC));
        assert_eq!(chosen(Memory::Pool(pool, HANDLE_TYPE_POSIX_FD), None), Some(POOL));
        // A type that this version has no use for does not hide the one that it has.
        assert_eq!(chosen(Memory::Virtual(HANDLE_TYPE_POSIX_FD | 0x40), None), Some(VIRTUAL_MEMORY));
    }

    #[test]
    fn what_has_no_handle_says_its_kind_and_the_line_that_helps() {
        let pool = Pool(0x55);
        let default_pool = refusal(Memory::Pool(pool, 0), None);
        assert!(default_pool.contains("a pool") && default_pool.contains("make_pool_shareable(device)"));
        assert!(refusal(Memory::Pool(pool, HANDLE_TYPE_FABRIC), None).contains("handleTypes ="));
        let bare = refusal(Memory::Virtual(0), None);
        assert!(bare.contains("cuMemCreate") && bare.contains("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"));
        assert!(bare.contains("expandable_segments"));
        assert!(matches!(Memory::Foreign.choose(PTR, None), Err(Error::SharedOn { ptr: PTR })));
    }

    #[test]
    fn a_stated_kind_is_made_or_refused_by_name() {
        assert_eq!(chosen(Memory::Plain, Some(LEGACY)), Some(LEGACY));
        let refused = refusal(Memory::Plain, Some(VIRTUAL_MEMORY));
        assert!(
            refused.contains("no handle of kind 2 (virtual-memory); ask for kind 1 (legacy)"),
            "{refused}"
        );
        let refused = refusal(Memory::Virtual(HANDLE_TYPE_POSIX_FD), Some(LEGACY));
        assert!(
            refused.contains("no handle of kind 1 (legacy); ask for kind 2 (virtual-memory)"),
            "{refused}"
        );
        assert!(refusal(Memory::Plain, Some(HandleKind(77))).contains("kind 77 (unknown to this version)"));
    }
}
