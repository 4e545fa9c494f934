//! Copies between hosts with the real NIXL, over TCP on the loopback interface.
//!
//! The tests are skipped if no NIXL is installed, unless `DEVICE_IPC_NIXL` names one; `cargo xtask nixl` provides it.

use std::env;
use std::sync::Arc;

use device_ipc_core::backend::engine::TransferEngine;
use device_ipc_nixl::{LIBRARY_VARIABLE, NixlEngine};
use device_ipc_remote_tests::{RingShape, cases};
use device_ipc_test_process::Process;

/// The smallest region, a tensor, pages, and some of many packets.
const LENGTHS: [usize; 6] = [1, 64, 4096, 1_000_003, 64 << 20, 256 << 20];

/// A ring of few slots, one of a single slot, and one whose slots take a while.
const RINGS: [RingShape; 3] = [(3, 8192, 300), (1, 256, 200), (2, 3 << 20, 20)];

/// UCX on the loopback interface, by TCP alone. NIXL logs the errors that the tests provoke.
const ENVIRONMENT: [(&str, &str); 3] =
    [("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"), ("NIXL_LOG_LEVEL", "FATAL")];

fn engine() -> Result<Arc<dyn TransferEngine>, String> {
    match NixlEngine::load() {
        Ok(engine) => Ok(Arc::new(engine)),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
#[ignore = "a process of the other tests"]
fn exporter() {
    device_ipc_remote_tests::exporter(engine);
}

#[test]
#[ignore = "a process of the other tests"]
fn importer() {
    device_ipc_remote_tests::importer(engine);
}

#[test]
#[ignore = "a process of the other tests"]
fn channel_end() {
    device_ipc_remote_tests::channel_end(engine);
}

/// Starts a process, unless no NIXL is installed; prints the reason then.
fn start(role: &str, arguments: &str) -> Option<Process> {
    let mut process = Process::of_test(&format!("{}::{role}", module_path!()), &ENVIRONMENT);
    let loaded = process.ask(&format!("load {arguments}"));
    if loaded.starts_with("library not found") && env::var_os(LIBRARY_VARIABLE).is_none() {
        eprintln!("skipped: {loaded}; `cargo xtask nixl` downloads it");
        return None;
    }
    assert!(loaded.starts_with("loaded"), "{loaded}");
    Some(process)
}

cases! {
    start;
    pulled_bytes_are_those_of_the_exporter(&LENGTHS),
    state_dict_is_pulled,
    pull_into_existing_memory_writes_the_tensors_alone,
    memory_of_a_failed_pull_into_is_kept_as_long_as_it_is_written,
    progress_is_reported,
    memory_of_another_host_is_pulled,
    stale_descriptors_are_refused,
    pull_waits_until_the_bytes_are_ready,
    pull_fails_when_the_exporter_is_killed,
    pull_from_a_suspended_exporter_times_out,
    lease_ends_when_the_importer_is_killed,
    dropped_export_is_kept_until_the_pull_has_finished,
    lease_of_a_silent_importer_ends,
    repeated_pulls_leave_nothing_over(10_000),
    ring_publications_arrive_in_order(&RINGS),
    ring_of_another_host_is_pulled,
    ring_writer_waits_for_a_slow_reader,
    ring_reader_reports_the_death_of_the_writer,
    ring_reader_reports_the_death_of_the_writer_in_a_copy,
    ring_reader_reports_a_suspended_writer,
    ring_writer_continues_when_the_reader_is_killed,
    ring_reader_that_is_suspended_is_dismissed,
    ring_reader_is_dismissed,
    ring_leaves_nothing_over(10_000),
}

#[test]
fn ring_has_readers_of_several_hosts() {
    device_ipc_remote_tests::ring_has_readers_of_several_hosts(start);
}

#[test]
fn dropped_export_of_a_message_is_pulled() {
    let Some(ends) = device_ipc_remote_tests::Ends::start(start) else { return };
    device_ipc_remote_tests::dropped_export_of_a_message_is_pulled(ends, "pulled");
}
