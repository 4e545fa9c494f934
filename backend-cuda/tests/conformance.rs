//! Runs the conformance suite on CUDA, once for each kind of memory: on a GPU or a simulator. Passes without either,
//! unless `DEVICE_IPC_CONFORMANCE_REQUIRE=1` requires one.

use std::process::ExitCode;

use device_ipc_conformance::Suite;
use device_ipc_cuda::{CudaBackend, FABRIC, FabricSupport, LEGACY, POOL, VIRTUAL_MEMORY};

fn main() -> ExitCode {
    let mut suite = Suite::new("cuda")
        .variant("legacy", || Ok(CudaBackend::load_allocating(LEGACY)?))
        .variant("virtual-memory", || Ok(CudaBackend::load_allocating(VIRTUAL_MEMORY)?))
        .variant("pool", || Ok(CudaBackend::load_allocating(POOL)?));
    // Few machines have an IMEX channel.
    if CudaBackend::load().is_ok_and(|backend| matches!(backend.fabric(0), Ok(FabricSupport::Available))) {
        suite = suite.variant("fabric", || Ok(CudaBackend::load_allocating(FABRIC)?));
    }
    suite.expected_skips(include_str!("expected-skips.txt")).run()
}
