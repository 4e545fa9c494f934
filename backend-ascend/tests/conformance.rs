//! Runs the conformance suite on Ascend: on the simulator of ACL, or on a real server if `DEVICE_IPC_ASCEND_LIBRARY` or
//! `DEVICE_IPC_ASCEND_HARDWARE=1` is set.

mod support;

use std::process::ExitCode;

use device_ipc_ascend::{LoadOptions, PidValidation, SHAREABLE};
use device_ipc_conformance::Suite;
use device_ipc_sim_ascendcl::Cann;

use support::{hardware, simulated};

/// The themes that depend on the chip and on the version of CANN: devices, opening, ordering, and the termination of processes.
const THEMES: [&str; 6] = ["placement", "kinds", "ordering", "lifetimes", "bundles", "device_memory"];

fn main() -> ExitCode {
    if hardware() {
        return Suite::new("ascend")
            .variant("hardware", || Ok(LoadOptions::new().load()?))
            .expected_skips(include_str!("hardware-skips.txt"))
            .run();
    }
    let validated = |machine: &'static str, cann| move || Ok(simulated(machine, cann).load()? as _);
    let shareable =
        |machine: &'static str, cann| move || Ok(simulated(machine, cann).allocates(SHAREABLE).load()? as _);
    Suite::new("ascend")
        .variant("a2", validated("soc=910b;devices=2", Cann::V9_1))
        .variant("shareable", shareable("soc=910b;devices=2", Cann::V9_1))
        .variant("a3-unvalidated", || {
            // A machine whose streams write words in host memory: unknown for real ones.
            let options = simulated("soc=910_93;devices=2;host-words", Cann::V9_0);
            Ok(options.pid_validation(PidValidation::Off).load()? as _)
        })
        .variant("310p", validated("soc=310p;devices=2", Cann::V9_0))
        .variant("cann-8.5", validated("soc=910b;devices=2;peers=none", Cann::V8_5))
        .variant_of_themes("a2-cann-8.3", &THEMES, validated("soc=910b;devices=2", Cann::V8_3))
        .variant_of_themes("a3-cann-8.5", &THEMES, shareable("soc=910_93;devices=2", Cann::V8_5))
        .variant_of_themes("a3-two-links", &THEMES, validated("soc=910_93;devices=2;two-links", Cann::V9_1))
        .variant_of_themes("950", &THEMES, validated("soc=950;devices=2", Cann::V9_1))
        .variant_of_themes("950-shareable", &THEMES, shareable("soc=950;devices=2", Cann::V9_0))
        .expected_skips(include_str!("expected-skips.txt"))
        .run()
}
