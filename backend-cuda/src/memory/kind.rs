//! The kinds of handle of this backend.
//!
//! The memory determines its kind ([`source`](super::source)). Descriptors contain the number of a kind, so a number
//! never changes its meaning.

use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use device_ipc_core::DeviceOrdinal;
use device_ipc_core::backend::{HandleKind, HandleKindInfo};

use crate::bindings::layout::HANDLE_TYPE_POSIX_FD;
use crate::objects::driver::Driver;

/// A legacy IPC handle: 64 bytes of `cuIpcGetMemHandle` for memory of `cuMemAlloc` (`cudaMalloc`).
///
/// Always read-write. Importers pin the memory. The bytes contain the exporter's process id: if exporter and importer
/// have the same one, each in its own pid namespace, the driver mistakes the importer for the exporter and refuses.
/// Small blocks share a page of 2 MiB, all of which an importer's kernels can read and write.
pub const LEGACY: HandleKind = HandleKind(1);

/// Virtual memory: a file descriptor for each block of `cuMemCreate` that was created with
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
///
/// A region may span several blocks that are mapped side by side (PyTorch's expandable segments); the importer maps
/// them as one range. A mapping can be read-only, an importer reaches only the blocks, and pid namespaces do not
/// matter. Importers pin the memory.
pub const VIRTUAL_MEMORY: HandleKind = HandleKind(2);

/// Memory of a pool: the pool's file descriptor, and 64 bytes of `cuMemPoolExportPointer`.
///
/// For memory of `cuMemAllocAsync`, which cudarc's and candle's slices come from, after the device's pool was made
/// shareable ([`make_pool_shareable`](crate::make_pool_shareable)). Always read-write. Pid namespaces do not matter. An
/// importer has the whole pool open, by its file descriptor: its kernels can reach other memory in the pool, and if the
/// exporter exits, the importer pins all of it until it closes its last mapping of the pool.
pub const POOL: HandleKind = HandleKind(3);

/// A fabric handle: 64 bytes for each block of `cuMemCreate` that was created with `CU_MEM_HANDLE_TYPE_FABRIC`.
///
/// Behaves like [`VIRTUAL_MEMORY`], without file descriptors. Both processes need access to the same IMEX channel;
/// [`CudaBackend::fabric`](crate::CudaBackend::fabric) returns whether a device supports it.
pub const FABRIC: HandleKind = HandleKind(4);

/// The inode of a machine's initial pid namespace: `PROC_PID_INIT_INO` of Linux.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Returns the name of a kind.
pub(crate) fn name(kind: HandleKind) -> &'static str {
    match kind {
        LEGACY => "legacy",
        VIRTUAL_MEMORY => "virtual-memory",
        POOL => "pool",
        FABRIC => "fabric",
        _ => "unknown",
    }
}

/// Returns the kinds that the driver has functions for, starting with `default`.
pub(crate) fn all(driver: &Driver, default: HandleKind) -> Vec<HandleKindInfo> {
    let mut kinds: Vec<_> = [LEGACY, VIRTUAL_MEMORY, POOL, FABRIC]
        .into_iter()
        .filter(|kind| is_supported(driver, *kind))
        .map(describe)
        .collect();
    kinds.sort_by_key(|info| info.kind != default);
    kinds
}

/// Returns whether the driver has the functions of a kind.
fn is_supported(driver: &Driver, kind: HandleKind) -> bool {
    match kind {
        LEGACY => true,
        VIRTUAL_MEMORY | FABRIC => driver.api.virtual_memory.is_some(),
        POOL => driver.api.pools.is_some(),
        _ => false,
    }
}

fn describe(kind: HandleKind) -> HandleKindInfo {
    let mut info = HandleKindInfo::new(kind, name(kind));
    info.read_only = matches!(kind, VIRTUAL_MEMORY | FABRIC);
    info.carries_fds = matches!(kind, VIRTUAL_MEMORY | POOL);
    info.isolated = matches!(kind, VIRTUAL_MEMORY | FABRIC);
    info.across_pid_namespaces = kind != LEGACY;
    info.remappable = matches!(kind, VIRTUAL_MEMORY | FABRIC);
    info
}

/// Returns the kind that memory is allocated for by default: legacy; virtual memory in a container's pid namespace,
/// where a peer may have the same process id, if all devices support it.
pub(crate) fn default(driver: &Driver) -> HandleKind {
    let in_a_namespace = !is_initial_pid_namespace();
    let all_have_virtual_memory =
        || driver.devices.iter().all(|device| driver.has_virtual_memory(device.info.ordinal));
    if in_a_namespace && all_have_virtual_memory() { VIRTUAL_MEMORY } else { LEGACY }
}

/// Returns whether this process runs in the machine's initial pid namespace. Assumes so if `/proc` is unavailable.
fn is_initial_pid_namespace() -> bool {
    static INITIAL: OnceLock<bool> = OnceLock::new();
    *INITIAL.get_or_init(|| {
        std::fs::metadata("/proc/self/ns/pid")
            .map_or(true, |namespace| namespace.ino() == INITIAL_PID_NAMESPACE)
    })
}

impl Driver {
    /// Returns whether the device supports virtual memory with file descriptors.
    pub(crate) fn has_virtual_memory(&self, device: DeviceOrdinal) -> bool {
        const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: i32 = 102;
        const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: i32 = 103;
        let has = |attribute| self.device_attribute(device, attribute).is_some_and(|value| value != 0);
        self.api.virtual_memory.is_some()
            && has(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            && has(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    }

    /// Returns whether the device supports pools with file descriptors.
    pub(crate) fn has_shareable_pools(&self, device: DeviceOrdinal) -> bool {
        const MEMORY_POOLS_SUPPORTED: i32 = 115;
        const MEMPOOL_SUPPORTED_HANDLE_TYPES: i32 = 119;
        let posix_fd = HANDLE_TYPE_POSIX_FD as i32;
        self.api.pools.is_some()
            && self.device_attribute(device, MEMORY_POOLS_SUPPORTED).is_some_and(|value| value != 0)
            && self
                .device_attribute(device, MEMPOOL_SUPPORTED_HANDLE_TYPES)
                .is_some_and(|types| types & posix_fd != 0)
    }
}
