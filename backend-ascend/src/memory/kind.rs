//! The kinds of handle of this backend.
//!
//! Descriptors contain the number of a kind, so a number never changes its meaning.

use device_ipc_core::backend::{HandleKind, HandleKindInfo, Lifetime};

/// An IPC key of `aclrtIpcMemGetExportKey`, for memory of `aclrtMalloc`, and the size of the memory.
///
/// The exporter's close, free or exit **revokes** it: importers must release it first. Always read-write. A process
/// opens a key on one device only. The driver identifies processes by their ids on the host, also in containers.
pub const KEY: HandleKind = HandleKind(1);

/// A shareable handle of `aclrtMemExportToShareableHandle`, for physical memory that is mapped with `aclrtMapMem`.
///
/// Importers pin the memory. Always read-write: no page of the manual states that `aclrtMemSetAccess` restricts work of
/// the home device. Not supported on virtual NPUs.
pub const SHAREABLE: HandleKind = HandleKind(2);

/// Returns the supported kinds, the preferred one first.
pub(crate) fn all(shareable: bool, whitelist: bool, first: HandleKind) -> Vec<HandleKindInfo> {
    let mut key = HandleKindInfo::new(KEY, "key");
    key.lifetime = Lifetime::Revokes;
    key.one_open_per_process = true;
    key.whitelist = whitelist;
    key.across_pid_namespaces = true;
    let mut handle = HandleKindInfo::new(SHAREABLE, "shareable handle");
    handle.whitelist = whitelist;
    handle.isolated = true;
    handle.remappable = true;
    handle.across_pid_namespaces = true;
    match (shareable, first) {
        (false, _) => vec![key],
        (true, SHAREABLE) => vec![handle, key],
        (true, _) => vec![key, handle],
    }
}
