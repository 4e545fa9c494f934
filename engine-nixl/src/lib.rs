//! NIXL as a transfer engine of device-ipc: copies of host memory and CUDA memory between processes of different hosts.
//!
//! [`NixlEngine`] implements [`TransferEngine`](device_ipc_core::backend::engine::TransferEngine) with
//! [NIXL](https://github.com/ai-dynamo/nixl) and its plugin UCX, which uses InfiniBand, RoCE or TCP.
//!
//! # Security
//!
//! UCX listens on a TCP port of every network interface of the host, without authentication, from the moment that an engine
//! is loaded; `UCX_NET_DEVICES` limits the interfaces. Over TCP it reads and writes the addresses that a peer states: a process
//! that can reach the port can read and write this process's memory. Load an engine in trusted networks only.
//!
//! A peer can also terminate this process: UCX aborts an exporter's process that was suspended during a transfer and
//! continues after the importer has exited.
//!
//! # Library
//!
//! NIXL is loaded at run time from its C API, `libnixl_capi.so`, which the wheels `nixl-cu12` and `nixl-cu13` contain from
//! version 0.10.1 on. [`LIBRARY_VARIABLE`] names a library to load. Otherwise these places are searched, in this order:
//!
//! 1. the copy of NIXL that the process has loaded already;
//! 2. the wheels beside the Python packages that the process has loaded;
//! 3. the wheels in the environment that `VIRTUAL_ENV` or `CONDA_PREFIX` names;
//! 4. the search path of the dynamic linker;
//! 5. `/opt/nvidia/nvda_nixl` and `/usr/local/nixl`.
//!
//! The crate `nixl-sys` is not used: it compiles C++, and aborts the process if the library is missing.
//!
//! # Layers
//!
//! `bindings` (declarations of the C API) → `library` (the loaded library, statuses, errors) → `agent` (one agent of NIXL
//! with its registrations, peers and requests) → `engine` (the trait of device-ipc) → `process` (the settings of a process).
//! Each layer uses only those before it.

mod agent;
mod bindings;
mod engine;
mod exit;
mod library;
mod metadata;
mod peers;
mod process;

pub use engine::NixlEngine;
pub use library::NAME;
pub use library::search::LIBRARY_VARIABLE;
pub use process::{REMOTE_VARIABLE, listen, remote};

/// The target of the log events of this crate; `docs/guide/operations.md` lists all targets.
const LOG: &str = "device_ipc::nixl";
