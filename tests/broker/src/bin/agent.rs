//! The agent: carries out the commands of a test.

use device_ipc_test_process::CountingHeap;

#[global_allocator]
static ALLOCATOR: CountingHeap = CountingHeap;

fn main() {
    device_ipc_broker_tests::agent::run();
}
