//! The tests of the CUDA backend for lifetimes, with killed processes, on the simulator.

mod support;

#[path = "../../../backend-cuda/tests/lifetimes.rs"]
mod backend;

#[test]
fn pass_on_the_simulator() {
    support::run_tests("backend", "devices=2");
}

#[test]
#[ignore = "the child of the other tests"]
fn the_other_process() {
    support::become_test("backend::the_other_process");
}
