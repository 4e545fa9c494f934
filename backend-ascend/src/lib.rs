//! The Huawei Ascend backend of device-ipc.
//!
//! It has not run on hardware yet: it follows the ACL manual, the headers and the sources of CANN's runtime, and is
//! tested on a library that enforces their rules. `docs/guide/ascend.md` describes supported platforms, and how to try it
//! on a real server.
//!
//! # Function table
//!
//! The backend searches for ACL at run time, so that one binary works with and without an NPU, and with every CANN: a
//! missing library, a missing function or an unknown status is an error with a remedy. The table is generated from a
//! header of this crate; `symbols` lists the required functions.
//!
//! # Kinds of memory
//!
//! Memory of `aclrtMalloc` travels by [`KEY`]: the exporter's exit revokes it, so importers close first. Physical
//! memory that is mapped with `aclrtMapMem` travels by [`SHAREABLE`] handle, which pins it. For both kinds the driver
//! admits the processes that the exporter lists; the broker lists an importer when it grants a lease
//! ([`PidValidation`]).
//!
//! # Contexts
//!
//! All calls use the default context of a device, the one of `aclrtSetDevice`, like torch_npu. The first call that
//! needs it creates it, each call makes it current for its duration, and dropping the backend releases it. Listing
//! devices creates none.
//!
//! # Layers
//!
//! `bindings`, `symbols` (declarations of the headers) → `library` (the loaded ACL, statuses, errors) → `objects`
//! (devices, peer access, contexts, streams, events) → `memory` (each kind, with export and import) → `backend` (the
//! traits of device-ipc). Each layer uses only those before it.
//!
//! The code relies on rules of the ACL manual, <https://www.hiascend.com/document>, and of the sources of the runtime,
//! <https://gitcode.com/cann/runtime>; the modules name the pages.

#[cfg(test)]
extern crate self as device_ipc_ascend;

mod backend;
// Generated, and formatted by the generator: `cargo xtask bindgen --check` compares it byte by byte.
#[rustfmt::skip]
mod bindings;
mod library;
mod memory;
mod objects;
#[cfg(test)]
#[path = "../tests/rules/mod.rs"]
mod rules;
mod symbols;

pub use backend::{AscendBackend, LoadOptions, Observation, REGISTRATION};
pub use library::NAME;
pub use library::search::LIBRARY_VARIABLE;
pub use memory::kind::{KEY, SHAREABLE};
pub use memory::options::{ALLOCATION_VARIABLE, PidValidation, VALIDATION_VARIABLE};

/// The target of the log events of this crate; `docs/guide/operations.md` lists all targets.
const LOG: &str = "device_ipc::ascend";
