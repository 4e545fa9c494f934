//! A `libascendcl.so` that runs on the CPU.
//!
//! The developers have no Ascend card, and the vendor's library has many rules: the context of a thread, the
//! addresses that can be exported, the processes that may import, the effect of a close, the copies that work
//! between two cards. This library has the vendor's names, layouts and numbers, and applies the vendor's rules to
//! the devices of `device-ipc-mock-engine`, for several processes. It rejects what the vendor's stack rejects, and
//! also calls whose behavior is unknown. `docs/internals/ascend-rules.md` lists the rules.
//!
//! [`install()`] copies it to a directory as `libascendcl.so`, for `LD_LIBRARY_PATH`, `dlopen`, or the linker. It
//! does not depend on the device-ipc library: programs that were built with the vendor's headers run on it.
//!
//! # The machine
//!
//! The variable [`MACHINE_VARIABLE`] (`DEVICE_IPC_SIM_ASCEND`) has entries `key=value`, separated by semicolons.
//!
//! | key | meaning |
//! |---|---|
//! | `devices`, `memory`, `peers`, `latency` | as in the description of the mock's machine: number of devices, memory of each, peer access by physical id (`0>1,1>0`), delay of work |
//! | `visible` | the physical devices of the container, in the order of their logic ids |
//! | `soc` | `910`, `910b` (the default), `910_93`, `310p`, `310b`, `950` (or `950pr`), `950dt` |
//! | `cann` | the reported version: `8.1.RC1`, `8.3.RC1`, `8.5.0`, `9.0.0`, `9.1.0`; [`install()`] hides later symbols |
//! | `stub` | the vendor's stub library: every call prints a line on the standard output and returns 100039 |
//! | `no-driver` | no driver: counting the devices fails |
//! | `old-driver` | a driver that requires lists of processes, and has no shared events: 207000 |
//! | `host-words` | streams also write and wait for words in registered host memory, and each device of a process can register it; it is unknown whether a device supports this |
//! | `two-links` | on a chip of two dies, `910_93`, each die has a separate PCIe link; otherwise they share one, and have no peer access |
//! | `shared-peers` | a name: processes of machines with this name share their counts of peer access, as the driver counts all processes |
//! | `unaligned` | memory of `aclrtMalloc` with small pages begins inside a page, as memory behind other memory does |
//! | `page-size` | the page size of the host; events are shared only with 4096 |
//! | `fault` | `call:n:status`, several separated by commas: the nth call returns the status, any number |
//!
//! `ASCEND_RT_VISIBLE_DEVICES` selects among the devices of the container, as with the vendor's library.
//!
//! # Beyond the vendor
//!
//! `deviceIpcSimKernel(stream, kernel, argument)` runs a host function as a kernel, which accesses memory by
//! `deviceIpcSimLoad` and `deviceIpcSimStore`. `deviceIpcSimInject(name, after, status)` arms a fault, and
//! `deviceIpcSimCalls(name, &count)` counts calls. `tests/c/acl_sim.h` has their C declarations.

#![cfg(target_os = "linux")]
#![allow(non_snake_case, reason = "the names are the vendor's")]
#![allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "exported functions take pointers that their C caller vouches for"
)]
#![warn(missing_debug_implementations)]

pub mod abi;
mod block;
mod call;
pub mod callback;
mod cann;
mod config;
pub mod context;
pub mod copy;
pub mod device;
pub mod event;
pub mod extra;
pub mod host;
mod install;
pub mod ipc_event;
pub mod ipc_memory;
mod key;
pub mod memory;
mod node;
pub mod notify;
mod peers;
mod simulator;
mod soc;
mod status;
pub mod stream;
pub mod system;
pub mod value;
pub mod vmm;

pub use cann::Cann;
pub use config::{ConfigError, MACHINE_VARIABLE, VISIBLE_VARIABLE};
pub use install::{install, library};
pub use key::KEY_BYTES;
pub use soc::Soc;
pub use status::Status;
