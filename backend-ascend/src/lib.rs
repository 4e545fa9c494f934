//! The Huawei Ascend backend of device-ipc.
//!
//! It has not run on hardware yet: it follows the ACL manual, the headers and the sources of CANN's runtime, and is
//! tested on a library that enforces their rules. `docs/guide/ascend.md` says what is supported where, and how to try it
//! on a real server.
//!
//! # Why a table of functions
//!
//! ACL is looked for when the program runs, so that one binary works with and without an NPU, and with every CANN: a
//! missing library, a missing function or a status number that nobody knows yet is an error that says what to do.
//! The table is generated from a header of our own; which functions there have to be is in `symbols`.
//!
//! # What is shared, and how
//!
//! Memory of `aclrtMalloc` travels by [`KEY`]: the exporter's end revokes it, so importers close first. Physical memory
//! that is mapped with `aclrtMapMem` travels by [`SHAREABLE`] handle, which pins it. Either way the driver admits the
//! processes that the exporter lists; the broker lists an importer when it gives it a lease ([`PidValidation`]).
//!
//! # Contexts
//!
//! Everything happens in the default context of a device, the one of `aclrtSetDevice` that torch_npu uses too. It is taken
//! when a call first needs it, made current for the time of a call only, and given back with the backend. Listing devices
//! takes none.
//!
//! Rules of the vendor that the code relies on are in the ACL manual, <https://www.hiascend.com/document>, and in
//! the sources of the runtime, <https://gitcode.com/cann/runtime>; the modules name the pages.

mod backend;
// Generated, and formatted by the generator: `cargo xtask bindgen --check` compares it byte by byte.
#[rustfmt::skip]
mod bindings;
mod library;
mod memory;
mod objects;
mod symbols;

pub use backend::{AscendBackend, LoadOptions, Observation, REGISTRATION};
pub use library::NAME;
pub use library::search::LIBRARY_VARIABLE;
pub use memory::kind::{KEY, SHAREABLE};
pub use memory::options::{ALLOCATION_VARIABLE, PidValidation, VALIDATION_VARIABLE};
