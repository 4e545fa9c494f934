//! Registers one backend by hand and ignores those that registered themselves.

use device_ipc::backend::Backends;
use device_ipc::{Ipc, mock};

fn main() -> Result<(), device_ipc::Error> {
    let backends = Backends::none().with(mock::REGISTRATION);
    for status in backends.available() {
        println!("{status}");
    }
    let ipc = Ipc::builder().backends(backends).allow_simulated(true).auto()?;
    println!("took {}", ipc.backend().info().name);
    Ok(())
}
