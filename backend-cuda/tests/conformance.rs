//! Runs the conformance suite on CUDA: on a GPU once for each kind of memory, else on the simulator of two devices. Passes without
//! either, unless `DEVICE_IPC_CONFORMANCE_REQUIRE=1` requires one.

use std::process::ExitCode;

use device_ipc_conformance::Suite;
use device_ipc_cuda::{CudaBackend, FABRIC, FabricSupport, LEGACY, POOL, VIRTUAL_MEMORY};
use device_ipc_sim_cuda::{VARIABLE, library};

fn main() -> ExitCode {
    let suite = Suite::new("cuda").expected_skips(include_str!("expected-skips.txt"));
    let backend = CudaBackend::load();
    if backend.is_err()
        && let Ok(library) = library()
    {
        // Processes that the suite starts inherit the description of the machine, and the visible devices.
        if std::env::var_os(VARIABLE).is_none() {
            // SAFETY: no other thread runs in this process yet.
            unsafe {
                std::env::set_var(VARIABLE, "devices=2;memory=4GiB");
                std::env::set_var("DEVICE_IPC_CONFORMANCE_REQUIRE", "1");
                std::env::remove_var("CUDA_VISIBLE_DEVICES");
            }
        }
        return suite.variant("simulator", move || Ok(CudaBackend::load_from(&library)?)).run();
    }
    let mut suite = suite
        .variant("legacy", || Ok(CudaBackend::load_allocating(LEGACY)?))
        .variant("virtual-memory", || Ok(CudaBackend::load_allocating(VIRTUAL_MEMORY)?))
        .variant("pool", || Ok(CudaBackend::load_allocating(POOL)?));
    // Few machines have an IMEX channel.
    if backend.is_ok_and(|backend| matches!(backend.fabric(0), Ok(FabricSupport::Available))) {
        suite = suite.variant("fabric", || Ok(CudaBackend::load_allocating(FABRIC)?));
    }
    suite.run()
}
