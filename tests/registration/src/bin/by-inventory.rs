//! Names no backend anywhere; prints those that are registered.

fn main() {
    for status in device_ipc::Ipc::available() {
        println!("{}", status.name);
    }
}
