//! Copies between hosts with the real NIXL, over TCP on the loopback interface, or over the transports in `UCX_TLS`.
//!
//! The memory is that of the mock, or of GPUs with `DEVICE_IPC_BACKEND=cuda` and, for example, `UCX_TLS=tcp,cuda_copy`. With a
//! transport that does not need the exporter's process (`cuda_ipc`), a copy has ended before the process that is to be killed
//! or suspended: `run.sh` of a bundle skips these cases.
//!
//! The tests are skipped if no NIXL is installed, unless `DEVICE_IPC_NIXL` names one; `.ci/nixl` provides it.

use device_ipc_remote_tests::{RingShape, cases};
use device_ipc_test_process::Process;

use super::nixl;

/// The smallest region, a tensor, pages, and some of many packets.
const LENGTHS: [usize; 6] = [1, 64, 4096, 1_000_003, 64 << 20, 256 << 20];

/// A ring of few slots, one of a single slot, and one whose slots take a while.
const RINGS: [RingShape; 3] = [(3, 8192, 300), (1, 256, 200), (2, 3 << 20, 20)];

device_ipc_remote_tests::processes! {
    exporter: exporter, nixl::engine;
    importer: importer, nixl::engine;
    channel_end: channel_end, nixl::engine;
}

fn start(role: &str, arguments: &str) -> Option<Process> {
    let path = format!("{}::{role}", module_path!());
    nixl::loaded(Process::of_test(&path, &nixl::environment("lo")), arguments)
}

cases!(all: start; &LENGTHS, &RINGS, pulls: 10_000, publications: 10_000);

#[test]
fn ring_has_readers_of_several_hosts() {
    device_ipc_remote_tests::ring_has_readers_of_several_hosts(start);
}

#[test]
fn dropped_export_of_a_message_is_pulled() {
    let Some(ends) = device_ipc_remote_tests::Ends::start(start) else { return };
    device_ipc_remote_tests::dropped_export_of_a_message_is_pulled(ends, "pulled");
}
