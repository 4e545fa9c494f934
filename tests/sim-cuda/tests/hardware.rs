//! The tests of the CUDA backend for a GPU, on the simulator.

mod support;

#[path = "../../../backend-cuda/tests/hardware.rs"]
mod backend;

#[test]
fn pass_on_the_simulator() {
    support::run_tests("backend", "devices=2;memory=64GiB");
}

#[test]
#[ignore = "the child of another test"]
fn the_other_process() {
    support::become_test("backend::the_other_process");
}
