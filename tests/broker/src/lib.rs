//! What the tests of the broker are made of.
//!
//! Why a crate: the broker is there for processes that die, stand still, lie and fork, so every test runs real
//! processes. The other side of a test is an *agent* (the program `broker-agent`), which does what it is told line by
//! line, so that a test reads from top to bottom in one place; it is killed and reaped when its [`Child`] goes.
//! [`Census`] counts what a process has, as the kernel sees it. [`Connection`], [`FakeServer`] and [`Forged`] speak the
//! protocol and write descriptors from the words of `docs/` alone, as a second implementation would, or a liar.

#![allow(unsafe_code, reason = "fork, setuid, and owners of memory that promise to keep it")]

use std::sync::OnceLock;

pub mod agent;
mod census;
mod child;
mod forged;
mod host;
mod points;
mod protocol;
mod raw;
mod second;
mod steps;
mod survivor;
mod wait;

pub use census::{Census, shared_memory_objects};
pub use child::{Answer, Child, Setup};
pub use device_ipc_conformance::check::Refusal as Failure;
pub use forged::{Forged, bundle_of_another};
pub use host::{NOBODY, can_start_through, is_root};
pub use points::kill_points;
pub use protocol::{Access, FromExporter, Grant, Handle, Identity, Listed, Refusal, ToExporter};
pub use raw::{Connection, FakeServer, Received, open_request};
pub use steps::{hand_over_through_ring, take_timelines};
pub use survivor::{Before, kill_rounds};
pub use wait::{DEADLINE, eventually, no_more_than, within};

/// An agent on a machine that this text describes.
#[macro_export]
macro_rules! agent {
    ($spec:expr) => {
        $crate::agent!($spec,)
    };
    ($spec:expr, $($setting:ident: $value:expr),* $(,)?) => {
        $crate::Child::start(&$crate::Setup {
            program: $crate::agent_program(env!("CARGO_BIN_EXE_broker-agent")),
            machine: $spec,
            $($setting: $value,)*
            ..Default::default()
        })
    };
}

/// The agent's program: as Cargo built it, unless `DEVICE_IPC_BROKER_AGENT` says where it is on a machine without Cargo.
pub fn agent_program(built: &'static str) -> &'static str {
    static NAMED: OnceLock<Option<String>> = OnceLock::new();
    NAMED.get_or_init(|| std::env::var("DEVICE_IPC_BROKER_AGENT").ok()).as_deref().unwrap_or(built)
}

/// Importers pin the memory, as with CUDA.
pub const PINNING: &str = "devices=2";

/// The exporter's end takes the memory away, as with Ascend.
pub const REVOKING: &str = "devices=2;lifetime=revoking";

/// The CUDA backend on the simulated driver.
pub const CUDA: &str = "cuda";

/// The Ascend backend on the simulated runtime.
pub const ASCEND: &str = "ascend";

/// Does the exporter's end take the memory away?
pub fn revokes(machine: &str) -> bool {
    matches!(machine, REVOKING | ASCEND)
}

/// Handles come with file descriptors.
pub const DESCRIPTORS: &str = "devices=2;handles=fds";
