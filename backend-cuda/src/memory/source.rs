//! The source of device memory: how it was allocated, and thus by which kinds of handle it can travel.

use device_ipc_core::backend::{HandleKind, Remedy};
use device_ipc_core::{DevicePtr, Error, Result};

use super::kind::{self, FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
use super::pointer::Pointer;
use crate::bindings::api::{MEMORYTYPE_HOST, Pool};
use crate::bindings::layout::{HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD};
use crate::library::CudaLibrary;
use crate::library::status::number;
use crate::remedy;

/// The source of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemorySource {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemCreate`, with these types of handle.
    Virtual(u32),
    /// `cuMemAllocAsync`, from this pool with these types of handle.
    Pool(Pool, u32),
    /// Another process, whose memory was opened here.
    Foreign,
}

impl MemorySource {
    /// Returns the source of the memory at `ptr`, whose attributes are `pointer`.
    pub(super) fn of(library: &CudaLibrary, ptr: DevicePtr, pointer: &Pointer) -> Result<Self> {
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
            Self::Plain
        } else if pointer.pool != Pool::NULL {
            Self::Pool(pointer.pool, pointer.handle_types)
        } else if pointer.handle_types != 0 || is_virtual(library, ptr) {
            Self::Virtual(pointer.handle_types)
        } else {
            // Only memory of cuIpcOpenMemHandle remains.
            Self::Foreign
        })
    }

    /// Returns the kinds of handle that the memory supports, the preferred one first.
    ///
    /// File descriptors precede fabric handles: they need no IMEX channel, and a process that only reads their bytes
    /// cannot open the memory.
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
                "memory of a pool (cuMemAllocAsync, which cudarc's and candle's slices come from)"
            }
            Self::Foreign => "memory of another process",
        }
    }

    /// Returns the kind of handle to export: `requested` if the memory supports it, else the preferred one if none was
    /// requested.
    pub(super) fn choose_kind(self, ptr: DevicePtr, requested: Option<HandleKind>) -> Result<HandleKind> {
        let kinds = self.kinds();
        let Some(preferred) = kinds.first() else { return Err(self.no_handle(ptr)) };
        match requested {
            None => Ok(*preferred),
            Some(requested) if kinds.contains(&requested) => Ok(requested),
            Some(requested) => Err(not_shareable(
                ptr,
                self.name(),
                format!(
                    "it has no handle of kind {} ({}); request kind {} ({}), or {}",
                    requested.0,
                    kind::name(requested),
                    preferred.0,
                    kind::name(*preferred),
                    Remedy::AllocateAs
                ),
            )),
        }
    }

    fn no_handle(self, ptr: DevicePtr) -> Error {
        let remedy = match self {
            Self::Foreign | Self::Plain => return Error::SharedOn { ptr },
            Self::Pool(_, 0) => format!(
                "its pool cannot be shared, like a device's default pool and pools of other processes; {}",
                remedy::ALLOCATE_FROM_SHAREABLE_POOL
            ),
            Self::Pool(..) => format!(
                "its pool was created without file descriptors; create it with handleTypes = \
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or {}",
                Remedy::ShareCopyOfMemory
            ),
            Self::Virtual(_) => format!(
                "it was created without a type of handle, or opened from another process (then {}); create it with \
                 requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, in PyTorch leave \
                 TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC unset or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or {}",
                Remedy::ForwardDescriptor,
                Remedy::ShareCopyOfMemory
            ),
        };
        not_shareable(ptr, self.name(), remedy)
    }
}

/// Returns whether the address was mapped with `cuMemMap`. Assumes so if the driver is too old for the query.
fn is_virtual(library: &CudaLibrary, ptr: DevicePtr) -> bool {
    let Some(api) = &library.api.virtual_memory else { return true };
    let mut handle = 0;
    // SAFETY: writes one handle; an address without a mapped handle is an error.
    let is_virtual = unsafe { (api.retain)(&raw mut handle, ptr.get()) } == number::SUCCESS;
    if is_virtual {
        // SAFETY: the call above gave this process a reference.
        unsafe { (api.release)(handle) };
    }
    is_virtual
}

fn not_shareable(ptr: DevicePtr, kind: &str, remedy: impl Into<String>) -> Error {
    Error::NotShareable { ptr, kind: kind.into(), remedy: remedy.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTR: DevicePtr = DevicePtr::new(0x7000_0000);

    fn chosen(source: MemorySource, requested: Option<HandleKind>) -> Option<HandleKind> {
        source.choose_kind(PTR, requested).ok()
    }

    fn refusal(source: MemorySource, requested: Option<HandleKind>) -> String {
        source.choose_kind(PTR, requested).unwrap_err().to_string()
    }

    #[test]
    fn preferred_kind_follows_source_and_prefers_descriptors() {
        let pool = Pool(0x55);
        assert_eq!(chosen(MemorySource::Plain, None), Some(LEGACY));
        assert_eq!(chosen(MemorySource::Virtual(HANDLE_TYPE_POSIX_FD), None), Some(VIRTUAL_MEMORY));
        assert_eq!(chosen(MemorySource::Virtual(HANDLE_TYPE_FABRIC), None), Some(FABRIC));
        let both = MemorySource::Virtual(HANDLE_TYPE_POSIX_FD | HANDLE_TYPE_FABRIC);
        assert_eq!(chosen(both, None), Some(VIRTUAL_MEMORY));
        assert_eq!(chosen(both, Some(FABRIC)), Some(FABRIC));
        assert_eq!(chosen(MemorySource::Pool(pool, HANDLE_TYPE_POSIX_FD), None), Some(POOL));
        // An unsupported type does not hide the supported one.
        assert_eq!(chosen(MemorySource::Virtual(HANDLE_TYPE_POSIX_FD | 0x40), None), Some(VIRTUAL_MEMORY));
    }

    #[test]
    fn memory_without_handle_error_names_source_and_remedy() {
        let pool = Pool(0x55);
        let default_pool = refusal(MemorySource::Pool(pool, 0), None);
        assert!(default_pool.contains("a pool") && default_pool.contains("make_pool_shareable(device)"));
        assert!(refusal(MemorySource::Pool(pool, HANDLE_TYPE_FABRIC), None).contains("handleTypes ="));
        let bare = refusal(MemorySource::Virtual(0), None);
        assert!(bare.contains("cuMemCreate") && bare.contains("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"));
        assert!(bare.contains("expandable_segments"));
        assert!(matches!(MemorySource::Foreign.choose_kind(PTR, None), Err(Error::SharedOn { ptr: PTR })));
    }

    #[test]
    fn unsupported_requested_kind_error_names_alternative() {
        assert_eq!(chosen(MemorySource::Plain, Some(LEGACY)), Some(LEGACY));
        let refused = refusal(MemorySource::Plain, Some(VIRTUAL_MEMORY));
        assert!(
            refused.contains("no handle of kind 2 (virtual-memory); request kind 1 (legacy)"),
            "{refused}"
        );
        let refused = refusal(MemorySource::Virtual(HANDLE_TYPE_POSIX_FD), Some(LEGACY));
        assert!(
            refused.contains("no handle of kind 1 (legacy); request kind 2 (virtual-memory)"),
            "{refused}"
        );
        assert!(refusal(MemorySource::Plain, Some(HandleKind(77))).contains("kind 77 (unknown)"));
    }
}
