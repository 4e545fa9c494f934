//! Runs the conformance suite on CUDA: on a GPU, or on a library that plays one. Passes where there is none, unless
//! `DEVICE_IPC_CONFORMANCE_REQUIRE=1` says that there must be.

use std::process::ExitCode;

use device_ipc_conformance::Suite;
use device_ipc_cuda::CudaBackend;

fn main() -> ExitCode {
    Suite::new("cuda")
        .variant("default", || Ok(CudaBackend::load()?))
        .expected_skips(include_str!("expected-skips.txt"))
        .run()
}
