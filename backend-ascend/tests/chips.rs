//! Runs the themes of the conformance suite that depend on the chip and on the version of CANN, on the chips and
//! versions that `conformance` does not cover.

mod support;

use std::process::ExitCode;

use device_ipc_ascend::SHAREABLE;
use device_ipc_conformance::Suite;
use device_ipc_sim_ascendcl::Cann;

use support::{hardware, simulated};

/// The themes on devices, open_expecting_success, ordering, and the termination of processes.
const THEMES: [&str; 6] = ["placement", "kinds", "ordering", "lifetimes", "bundles", "device_memory"];

fn main() -> ExitCode {
    if hardware() {
        println!("skipped: these are chips of the simulator");
        return ExitCode::SUCCESS;
    }
    let machine = |machine: &'static str, cann| move || Ok(simulated(machine, cann).load()? as _);
    let shareable =
        |machine: &'static str, cann| move || Ok(simulated(machine, cann).allocates(SHAREABLE).load()? as _);
    Suite::new("ascend-chips")
        .variant("a2-cann-8.3", machine("soc=910b;devices=2", Cann::V8_3))
        .variant("a3-cann-8.5", shareable("soc=910_93;devices=2", Cann::V8_5))
        .variant("a3-two-links", machine("soc=910_93;devices=2;two-links", Cann::V9_1))
        .variant("950", machine("soc=950;devices=2", Cann::V9_1))
        .variant("950-shareable", shareable("soc=950;devices=2", Cann::V9_0))
        .themes(&THEMES)
        .expected_skips(include_str!("chips-skips.txt"))
        .run()
}
