//! A `libascendcl.so` that runs on the CPU.
//!
//! Why: nobody who works on this has an Ascend card, and the rules of its library are many: which thread has a context,
//! which address can be exported, who may import it, what a close means, what a copy between two cards can do.
//! This library has the vendor's names, layouts and numbers, plays its rules on the devices of
//! `device-ipc-mock-engine`, for several processes, and says no where the vendor's stack says no; where it is not known
//! what that does, it says no, too. `docs/internals/ascend-rules.md` lists the rules.
//!
//! [`install`] puts it into a directory as `libascendcl.so`, to be found by `LD_LIBRARY_PATH`, by `dlopen`, or by the
//! linker. It is written against nothing of ours: programs against the vendor's headers run on it.
//!
//! # The machine
//!
//! One variable, [`MACHINE_VARIABLE`] (`DEVICE_IPC_SIM_ASCEND`), describes it: entries `key=value`, between semicolons.
//!
//! | key | meaning |
//! |---|---|
//! | `devices`, `memory`, `peers`, `latency` | as in the description of the mock's machine: how many, of what size, who reaches whom by physical id (`0>1,1>0`), how late work starts |
//! | `visible` | the physical devices that the container has, in the order of their logic ids |
//! | `soc` | `910`, `910b` (the default), `910_93`, `310p`, `310b`, `950` (or `950pr`), `950dt` |
//! | `cann` | the version that is reported: `8.1.RC1`, `8.3.RC1`, `8.5.0`, `9.0.0`, `9.1.0`; [`install`] leaves its symbols out |
//! | `stub` | the vendor's stub library: a line on the standard output, and 100039, from every call |
//! | `no-driver` | no driver: counting the devices fails |
//! | `old-driver` | a driver that cannot do without lists of processes, and has no shared events: 207000 |
//! | `host-words` | streams also write and wait for words in registered memory of the host, and each device of a process can register it; nobody knows whether a device does |
//! | `two-links` | on a chip of two dies, `910_93`, each die has a PCIe link of its own; otherwise they share one, and have no peer access |
//! | `shared-peers` | a name: processes whose machines have it count each other's peer access, as the driver counts that of all processes |
//! | `unaligned` | memory of `aclrtMalloc` with small pages begins inside one, as memory behind other memory does |
//! | `page-size` | of the host; events are shared with 4096 only |
//! | `fault` | `call:n:status`, several by commas: the n-th call returns that number, whatever it is |
//!
//! `ASCEND_RT_VISIBLE_DEVICES` chooses among the devices of the container, as with the vendor's library.
//!
//! # Beyond the vendor
//!
//! `deviceIpcSimKernel(stream, kernel, argument)` runs a function of the host as a kernel; it accesses memory by
//! `deviceIpcSimLoad` and `deviceIpcSimStore`. `deviceIpcSimInject(name, after, status)` arms a fault, and
//! `deviceIpcSimCalls(name, &count)` counts calls. Their C declarations stand in `tests/c/acl_sim.h`.

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
