//! The conformance suite on the CUDA backend, with the simulator of two devices.

use std::process::ExitCode;

use device_ipc_conformance::Suite;
use device_ipc_cuda::CudaBackend;
use device_ipc_sim_cuda::{VARIABLE, library};

fn main() -> ExitCode {
    // Processes that the suite starts from this program inherit the description of the machine, and the visible
    // devices.
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: no other thread runs in this process yet.
        unsafe {
            std::env::set_var(VARIABLE, "devices=2;memory=4GiB");
            std::env::set_var("DEVICE_IPC_CONFORMANCE_REQUIRE", "1");
            std::env::remove_var("CUDA_VISIBLE_DEVICES");
        }
    }
    Suite::new("cuda")
        .variant("simulator", || {
            let library = library().expect("the simulator was built");
            Ok(CudaBackend::load_from(library)?)
        })
        .expected_skips(include_str!("../../../backend-cuda/tests/expected-skips.txt"))
        .run()
}
