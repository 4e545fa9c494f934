//! Does what a test tells it.

fn main() {
    device_ipc_broker_tests::agent::run();
}
