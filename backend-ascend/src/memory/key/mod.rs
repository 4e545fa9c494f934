//! Memory of `aclrtMalloc`, shared by IPC key ("IPC Memory Sharing": `aclrtIpcMemGetExportKey`,
//! `aclrtIpcMemSetImportPid`, `aclrtIpcMemImportByKey`, `aclrtIpcMemClose`).

pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod table;
