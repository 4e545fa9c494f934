//! The kinds of handle that this backend makes.
//!
//! A number is in descriptors: it is never given another meaning.

use device_ipc_core::{HandleKind, HandleKindInfo, Lifetime};

use crate::options::PidValidation;

/// An IPC key of `aclrtIpcMemGetExportKey`, for memory of `aclrtMalloc`, and the size of the memory.
///
/// The exporter's close, free or end **revokes** it: importers have to let go first. Always read-write. A process opens
/// a key on one device only. The driver knows processes by their ids on the host, also in containers.
pub const KEY: HandleKind = HandleKind(1);

/// A shareable handle of `aclrtMemExportToShareableHandle`, for physical memory that is mapped with `aclrtMapMem`.
///
/// Importers pin the memory. Always read-write: no page of the manual says that `aclrtMemSetAccess` would hold a
/// device's own work back. Not on virtual NPUs.
pub const SHAREABLE: HandleKind = HandleKind(2);

/// Every kind, the preferred first.
pub(crate) fn all(shareable: bool, validation: PidValidation, first: HandleKind) -> Vec<HandleKindInfo> {
    let whitelist = validation == PidValidation::On;
    let key = HandleKindInfo {
        kind: KEY,
        name: "key",
        read_only: false,
        carries_fds: false,
        lifetime: Lifetime::Revokes,
        one_open_per_process: true,
        whitelist,
        isolated: false,
        across_pid_namespaces: true,
    };
    let handle = HandleKindInfo {
        kind: SHAREABLE,
        name: "shareable handle",
        read_only: false,
        carries_fds: false,
        lifetime: Lifetime::Pins,
        one_open_per_process: false,
        whitelist,
        isolated: true,
        across_pid_namespaces: true,
    };
    match (shareable, first) {
        (false, _) => vec![key],
        (true, SHAREABLE) => vec![handle, key],
        (true, _) => vec![key, handle],
    }
}
