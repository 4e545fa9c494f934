//! The tests of the broker, and their tools.
//!
//! Every test runs real processes, as the broker exists for processes that die, stop, lie and fork. The peer of a test is
//! an *agent* (the program `broker-agent`): a test sends it commands and reads from top to bottom in one place. The agent
//! is that of the conformance suite, with commands for hostile processes; dropping its [`Child`] kills and reaps it.
//! [`Census`] counts the resources of a process. [`Connection`], [`FakeServer`] and [`Forged`] speak the protocol and
//! write descriptors by the specification in `docs/` alone, as a second implementation would, or a liar. The functions of
//! this crate panic if something is otherwise than their description says.

#![allow(unsafe_code, reason = "fork, setuid, and owners of memory that promise to keep it")]

use std::sync::OnceLock;

pub mod agent;
mod child;
mod directory;
mod forged;
mod host;
mod points;
mod protocol;
mod raw;
mod second;
mod steps;
mod survivor;
mod wait;

pub use child::{Answer, Child, Setup};
pub use device_ipc_conformance::check::Refusal as Failure;
pub use device_ipc_test_process::{Census, shared_memory_objects};
pub use directory::Directory;
pub use forged::{Forged, bundle_of_another};
pub use host::{NOBODY, can_start_through, is_root};
pub use points::kill_points;
pub use protocol::{
    Access, FromExporter, Handle, Identity, LeaseAhead, Listed, Open, Opened, Refusal, Stage, ToExporter,
};
pub use raw::{Connection, FakeServer, Received, open_request};
pub use second::second_copy_stays_loaded;
pub use steps::{hand_over_late_bytes, hand_over_through_ring, take_timelines};
pub use survivor::{Before, kill_rounds};
pub use wait::{DEADLINE, advance_until, eventually, no_more_than, settle, within};

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

/// The exporter's exit revokes the memory, as with Ascend.
pub const REVOKING: &str = "devices=2;lifetime=revoking";

/// The CUDA backend on the simulated driver.
pub const CUDA: &str = "cuda";

/// The Ascend backend on the simulated runtime.
pub const ASCEND: &str = "ascend";

/// Returns whether the exporter's exit revokes the memory.
pub fn revokes(machine: &str) -> bool {
    matches!(machine, REVOKING | ASCEND)
}

/// Handles come with file descriptors.
pub const DESCRIPTORS: &str = "devices=2;handles=fds";
