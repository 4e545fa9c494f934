//! The conformance suite by the CUDA backend on the simulator with two devices.

use std::process::ExitCode;

use device_ipc_conformance::Suite;
use device_ipc_cuda::CudaBackend;
use device_ipc_sim_cuda::{VARIABLE, library};

fn main() -> ExitCode {
    // The processes that the suite starts of this program find the machine described, and the devices that they shall see.
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: nothing else runs yet in this process.
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
