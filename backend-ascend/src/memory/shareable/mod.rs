//! Physical memory, shared by shareable handle ("Virtual Memory Management": `aclrtMemExportToShareableHandle`,
//! `aclrtMemSetPidToShareableHandle`, `aclrtMemImportFromShareableHandle`).

pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod reserved;
pub(crate) mod table;
