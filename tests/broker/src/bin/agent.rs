//! The agent: carries out the commands of a test.

fn main() {
    device_ipc_broker_tests::agent::run();
}
