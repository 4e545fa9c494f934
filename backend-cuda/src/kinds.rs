//! The kinds of handle that this backend makes.
//!
//! One so far. Memory of `cuMemCreate` and of pools travels with file descriptors, can be read-only and works across
//! pid namespaces; those kinds get the next numbers. A number is in descriptors: it is never given another meaning.

use device_ipc_core::{HandleKind, HandleKindInfo, Lifetime};

/// A legacy IPC handle: 64 bytes of `cuIpcGetMemHandle` for memory of `cuMemAlloc`.
///
/// Always read-write. Importers pin the memory. The bytes hold the exporter's process id: between two processes
/// that have the same one, each in its own pid namespace, the driver takes the importer for the exporter and refuses.
pub const LEGACY: HandleKind = HandleKind(1);

/// Every kind, the preferred first.
pub(crate) fn all() -> Vec<HandleKindInfo> {
    vec![HandleKindInfo {
        kind: LEGACY,
        name: "legacy",
        read_only: false,
        carries_fds: false,
        lifetime: Lifetime::Pins,
        one_open_per_process: false,
        isolated: false,
        across_pid_namespaces: false,
    }]
}
