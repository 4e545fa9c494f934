//! Elements of half and float8 in cudarc's slices, two processes, on the simulator.

mod support;

#[path = "../../../tests/cuda_elements.rs"]
mod cuda_elements;

#[test]
fn passes_on_the_simulator() {
    support::run_tests("cuda_elements", "devices=1");
}

#[test]
#[ignore = "a role of the test above"]
fn role() {
    support::become_test("cuda_elements::role");
}
