//! Runs the conformance suite on Ascend: on the simulator of ACL, or on a real server if `DEVICE_IPC_ASCEND_LIBRARY` or
//! `DEVICE_IPC_ASCEND_HARDWARE=1` is set.

mod support;

use std::process::ExitCode;

use device_ipc_ascend::{LoadOptions, PidValidation, SHAREABLE};
use device_ipc_conformance::Suite;
use device_ipc_sim_ascendcl::Cann;

use support::{hardware, simulated};

fn main() -> ExitCode {
    if hardware() {
        return Suite::new("ascend")
            .variant("hardware", || Ok(LoadOptions::new().load()?))
            .expected_skips(include_str!("hardware-skips.txt"))
            .run();
    }
    let validated = |machine: &'static str, cann| move || Ok(simulated(machine, cann).load()? as _);
    Suite::new("ascend")
        .variant("a2", validated("soc=910b;devices=2", Cann::V9_1))
        .variant("shareable", || {
            let options = simulated("soc=910b;devices=2", Cann::V9_1);
            Ok(options.allocates(SHAREABLE).load()? as _)
        })
        .variant("a3-unvalidated", || {
            // A machine whose streams write words in host memory: unknown for real ones.
            let options = simulated("soc=910_93;devices=2;host-words", Cann::V9_0);
            Ok(options.pid_validation(PidValidation::Off).load()? as _)
        })
        .variant("310p", validated("soc=310p;devices=2", Cann::V9_0))
        .variant("cann-8.5", validated("soc=910b;devices=2;peers=none", Cann::V8_5))
        .expected_skips(include_str!("expected-skips.txt"))
        .run()
}
