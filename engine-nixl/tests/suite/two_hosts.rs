//! Copies by the real NIXL over TCP between two network namespaces, which differ in their host ids and boot ids.
//!
//! The tests are skipped if no NIXL is installed, unless `DEVICE_IPC_NIXL` names one (`.ci/nixl` provides it), and where
//! the system does not permit namespaces.

use device_ipc_remote_tests::{Conditions, DEVICE, Place, RingShape, cases, steps};
use device_ipc_test_process::Process;

use super::nixl;

/// The smallest region, a tensor, pages, some of many packets, and the memory of the mock's device, 1 GiB with the bytes around it.
const LENGTHS: [usize; 7] = [1, 64, 4096, 1_000_003, 64 << 20, 256 << 20, (1 << 30) - 8192];

/// A ring of few slots, one of a single slot, and one whose slots take a while.
const RINGS: [RingShape; 3] = [(3, 8192, 100), (1, 256, 100), (2, 3 << 20, 20)];

device_ipc_remote_tests::processes! {
    exporter: exporter, nixl::engine;
    importer: importer, nixl::engine;
}

fn start(conditions: &Conditions<'_>, role: &str, arguments: &str) -> Option<Process> {
    let path = format!("{}::{role}", module_path!());
    nixl::loaded(conditions.process(&path, &nixl::environment(DEVICE)), arguments)
}

cases! {
    between hosts: start;
    descriptor_of_another_host_opens_as_a_copy,
    pulled_bytes_are_those_of_the_exporter(&LENGTHS),
    state_dict_is_pulled,
    pull_over_a_lost_link_times_out,
    lease_ends_while_the_link_is_lost(true),
    ring_publications_arrive_in_order(&RINGS),
    ring_of_another_host_is_pulled,
    ring_writer_waits_for_a_slow_reader,
    ring_reader_reports_the_death_of_the_writer,
    ring_writer_continues_when_the_reader_is_killed,
}

// An importer that continues after its lease has ended still sends its request, and UCX reads the address in it by TCP: the exporter
// would be killed by a page fault.
steps!(start, Place::TwoHosts, frees_early: false);
