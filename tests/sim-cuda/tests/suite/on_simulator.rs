//! The tests of the CUDA backend and of cudarc's types for a GPU, on the simulator: each module of
//! `main.rs` in a process that loads it.
//!
//! Without a driver, as in this process, the tests of the modules skip themselves.

use super::support::run_tests;

#[test]
fn elements_of_half_and_float8_pass() {
    run_tests("cuda_elements", "devices=1");
}

#[test]
fn hand_over_with_cudarc_passes() {
    run_tests("cuda_hand_over", "devices=1");
}

#[test]
fn contexts_in_which_owners_are_dropped_pass() {
    run_tests("cuda_owner_drops", "devices=2;peers=none;memory=1GiB");
}

#[test]
fn hardware_tests_pass() {
    run_tests("hardware", "devices=2;memory=64GiB");
}

#[test]
fn every_kind_of_memory_passes() {
    run_tests("kinds", "devices=2;memory=4GiB;imex");
}

#[test]
fn homes_that_are_hidden_or_renumbered_pass() {
    for peers in ["all", "none"] {
        run_tests("visible_devices", &format!("devices=2;peers={peers}"));
    }
}

#[test]
fn replaced_versions_pass() {
    run_tests("reserved", "devices=1;memory=1GiB");
}

#[test]
fn lifetimes_with_killed_processes_pass() {
    run_tests("lifetimes", "devices=2");
}
