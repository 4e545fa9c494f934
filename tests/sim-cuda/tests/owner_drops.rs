//! The contexts in which owners of memory are dropped, on the simulator.

mod support;

#[path = "../../../tests/cuda_owner_drops.rs"]
mod cuda_owner_drops;

#[test]
fn passes_on_the_simulator() {
    support::run_tests("cuda_owner_drops", "devices=2;peers=none;memory=1GiB");
}

#[test]
#[ignore = "a role of the test above"]
fn role() {
    support::become_test("cuda_owner_drops::role");
}
