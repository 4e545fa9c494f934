//! The kinds of handle that this backend makes.
//!
//! Which of them a block of memory has is told by the block ([`export`](crate::export)). A number is in descriptors: it
//! is never given another meaning.

use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use device_ipc_core::{DeviceOrdinal, HandleKind, HandleKindInfo, Lifetime};

use crate::driver::Driver;

/// A legacy IPC handle: 64 bytes of `cuIpcGetMemHandle` for memory of `cuMemAlloc` (`cudaMalloc`).
///
/// Always read-write. Importers pin the memory. The bytes hold the exporter's process id: between two processes
/// that have the same one, each in its own pid namespace, the driver takes the importer for the exporter and refuses. Small
/// blocks share a page of 2 MiB, all of which an importer's kernels can read and write.
pub const LEGACY: HandleKind = HandleKind(1);

/// Virtual memory: a file descriptor for each block of `cuMemCreate` that was created with
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
///
/// A region may lie across several blocks that are mapped side by side (PyTorch's expandable segments); the importer
/// maps them as one range. A mapping can be read-only, an importer reaches nothing but the blocks, and pid namespaces do
/// not matter. Importers pin the memory.
pub const VIRTUAL_MEMORY: HandleKind = HandleKind(2);

/// Memory of a pool: the pool's file descriptor, and 64 bytes of `cuMemPoolExportPointer`.
///
/// For memory of `cuMemAllocAsync`, where cudarc's and candle's slices come from, once the device's pool is one that can
/// be shared ([`make_pool_shareable`](crate::make_pool_shareable)). Always read-write. Pid namespaces do not matter.
/// An importer has the whole pool open, by its file descriptor: its kernels can reach what else lies in the pool, and when
/// the exporter dies, it pins all of that until the last of its mappings of the pool is closed.
pub const POOL: HandleKind = HandleKind(3);

/// A fabric handle: 64 bytes for each block of `cuMemCreate` that was created with `CU_MEM_HANDLE_TYPE_FABRIC`.
///
/// As [`VIRTUAL_MEMORY`], without file descriptors. Both processes need access to the same IMEX channel;
/// [`CudaBackend::fabric`](crate::CudaBackend::fabric) says whether a device can.
pub const FABRIC: HandleKind = HandleKind(4);

/// The inode of the pid namespace that a machine starts with: `PROC_PID_INIT_INO` of Linux.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// What people call a kind.
pub(crate) fn name(kind: HandleKind) -> &'static str {
    match kind {
        LEGACY => "legacy",
        VIRTUAL_MEMORY => "virtual-memory",
        POOL => "pool",
        FABRIC => "fabric",
        _ => "unknown to this version",
    }
}

/// Every kind that the driver has the functions for, the one that [`DeviceMemory`](device_ipc_core::DeviceMemory)
/// allocates for first.
pub(crate) fn all(driver: &Driver, preferred: HandleKind) -> Vec<HandleKindInfo> {
    let mut kinds: Vec<_> = [LEGACY, VIRTUAL_MEMORY, POOL, FABRIC]
        .into_iter()
        .filter(|kind| is_known(driver, *kind))
        .map(describe)
        .collect();
    kinds.sort_by_key(|info| info.kind != preferred);
    kinds
}

/// Has the driver the functions for this kind?
pub(crate) fn is_known(driver: &Driver, kind: HandleKind) -> bool {
    match kind {
        LEGACY => true,
        VIRTUAL_MEMORY | FABRIC => driver.api.virtual_memory.is_some(),
        POOL => driver.api.pools.is_some(),
        _ => false,
    }
}

fn describe(kind: HandleKind) -> HandleKindInfo {
    HandleKindInfo {
        kind,
        name: name(kind),
        read_only: matches!(kind, VIRTUAL_MEMORY | FABRIC),
        carries_fds: matches!(kind, VIRTUAL_MEMORY | POOL),
        lifetime: Lifetime::Pins,
        one_open_per_process: false,
        isolated: matches!(kind, VIRTUAL_MEMORY | FABRIC),
        across_pid_namespaces: kind != LEGACY,
        whitelist: false,
    }
}

/// The kind of handle that memory is allocated for where nobody says: legacy, and where processes may meet one with
/// their own process id (in a container's pid namespace) a kind that bears it.
pub(crate) fn preferred(driver: &Driver) -> HandleKind {
    let in_a_namespace = !is_initial_pid_namespace();
    let all_have_virtual_memory =
        || driver.devices.iter().all(|device| driver.has_virtual_memory(device.info.ordinal));
    if in_a_namespace && all_have_virtual_memory() { VIRTUAL_MEMORY } else { LEGACY }
}

/// Counts this process its pids as the machine does? Assumed where `/proc` does not tell.
fn is_initial_pid_namespace() -> bool {
    static INITIAL: OnceLock<bool> = OnceLock::new();
    *INITIAL.get_or_init(|| {
        std::fs::metadata("/proc/self/ns/pid")
            .map_or(true, |namespace| namespace.ino() == INITIAL_PID_NAMESPACE)
    })
}

impl Driver {
    /// Can memory of the device be shared by file descriptor?
    pub(crate) fn has_virtual_memory(&self, device: DeviceOrdinal) -> bool {
        const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: i32 = 102;
        const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: i32 = 103;
        let has = |attribute| self.device_attribute(device, attribute).is_some_and(|value| value != 0);
        self.api.virtual_memory.is_some()
            && has(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            && has(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    }

    /// Can the device have pools that are shared by file descriptor?
    pub(crate) fn has_shareable_pools(&self, device: DeviceOrdinal) -> bool {
        const MEMORY_POOLS_SUPPORTED: i32 = 115;
        const MEMPOOL_SUPPORTED_HANDLE_TYPES: i32 = 119;
        let posix_fd = crate::layout::HANDLE_TYPE_POSIX_FD as i32;
        self.api.pools.is_some()
            && self.device_attribute(device, MEMORY_POOLS_SUPPORTED).is_some_and(|value| value != 0)
            && self
                .device_attribute(device, MEMPOOL_SUPPORTED_HANDLE_TYPES)
                .is_some_and(|types| types & posix_fd != 0)
    }

    /// An attribute of a device, or `None` where the driver does not know it.
    fn device_attribute(&self, device: DeviceOrdinal, attribute: i32) -> Option<i32> {
        let device = self.device(device).ok()?;
        let mut value = 0;
        // SAFETY: writes one int; an attribute that the driver does not know is an error.
        let status = unsafe { (self.api.device_get_attribute)(&raw mut value, attribute, device.handle) };
        (status == crate::status::number::SUCCESS).then_some(value)
    }
}
