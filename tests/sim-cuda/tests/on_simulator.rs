//! The tests of the CUDA backend and of cudarc's types for a GPU, on the simulator: each module in a process that loads it.
//!
//! Without a driver, as in this process, the tests of the modules skip themselves.

#![allow(clippy::duplicate_mod, reason = "the included files have the same support modules")]

mod support;

#[path = "../../cuda_elements.rs"]
mod cuda_elements;
#[path = "../../cuda_hand_over.rs"]
mod cuda_hand_over;
#[path = "../../cuda_owner_drops.rs"]
mod cuda_owner_drops;
#[path = "../../../backend-cuda/tests/suite/gpu.rs"]
mod gpu;
#[path = "../../../backend-cuda/tests/suite/hardware.rs"]
mod hardware;
#[path = "../../../backend-cuda/tests/suite/kinds/mod.rs"]
mod kinds;
#[path = "../../../backend-cuda/tests/suite/lifetimes.rs"]
mod lifetimes;
#[path = "../../../backend-cuda/tests/suite/visible_devices.rs"]
mod visible_devices;

#[test]
fn elements_of_half_and_float8_pass() {
    support::run_tests("cuda_elements", "devices=1");
}

#[test]
fn hand_over_with_cudarc_passes() {
    support::run_tests("cuda_hand_over", "devices=1");
}

#[test]
fn contexts_in_which_owners_are_dropped_pass() {
    support::run_tests("cuda_owner_drops", "devices=2;peers=none;memory=1GiB");
}

#[test]
fn hardware_tests_pass() {
    support::run_tests("hardware", "devices=2;memory=64GiB");
}

#[test]
fn every_kind_of_memory_passes() {
    support::run_tests("kinds", "devices=2;memory=4GiB;imex");
}

#[test]
fn homes_that_are_hidden_or_renumbered_pass() {
    for peers in ["all", "none"] {
        support::run_tests("visible_devices", &format!("devices=2;peers={peers}"));
    }
}

#[test]
fn lifetimes_with_killed_processes_pass() {
    support::run_tests("lifetimes", "devices=2");
}
