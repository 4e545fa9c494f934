//! The example with cudarc, two processes, on the simulator with the example's kernel.

mod support;

#[path = "../../../tests/cuda_hand_over.rs"]
mod cuda_hand_over;

#[test]
fn passes_on_the_simulator() {
    support::run_tests("cuda_hand_over", "devices=1");
}

#[test]
#[ignore = "a role of the test above"]
fn role() {
    support::become_test("cuda_hand_over::role");
}
