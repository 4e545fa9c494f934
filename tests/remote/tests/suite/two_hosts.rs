//! Copies between two network namespaces, and processes that end at each step of a copy, by an engine of sockets.

use device_ipc_remote_tests::{Conditions, Place, RingShape, cases, socket_engine, steps};
use device_ipc_test_process::Process;

/// The smallest region, a tensor, a page, and one of many packets.
const LENGTHS: [usize; 4] = [1, 64, 4096, 64 << 20];

/// A ring of few slots, one of a single slot, and one whose slots take a while.
const RINGS: [RingShape; 3] = [(3, 8192, 100), (1, 256, 100), (2, 3 << 20, 20)];

device_ipc_remote_tests::processes! {
    exporter: exporter, || socket_engine("sockets");
    importer: importer, || socket_engine("sockets");
}

fn start(conditions: &Conditions<'_>, role: &str, arguments: &str) -> Option<Process> {
    let mut process = conditions.process(&format!("{}::{role}", module_path!()), &[]);
    let loaded = process.ask(&format!("load {arguments}"));
    assert!(loaded.starts_with("loaded"), "{loaded}");
    Some(process)
}

cases! {
    between hosts: start;
    descriptor_of_another_host_opens_as_a_copy,
    pulled_bytes_are_those_of_the_exporter(&LENGTHS),
    state_dict_is_pulled,
    pull_fails_when_the_exporter_is_killed,
    pull_over_a_lost_link_times_out,
    lease_ends_while_the_link_is_lost(false),
    ring_publications_arrive_in_order(&RINGS),
    ring_of_another_host_is_pulled,
    ring_writer_waits_for_a_slow_reader,
    ring_reader_reports_the_death_of_the_writer,
    ring_writer_continues_when_the_reader_is_killed,
}

// On this host, where no permission is needed.
steps!(start, Place::Here, frees_early: true);
