//! Programs that run on a profile of the mock (`like=cuda`, `like=ascend`) and on the simulator of that vendor, with the same
//! outcome: success, or the same variant of the error.

mod peer;
mod programs;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use device_ipc_test_process::{Process, command_of_test};

/// The programs that each vendor has at least.
const PROGRAMS: usize = 100;

/// The machines, whose descriptions the mock and the simulators understand.
const MACHINES: [&str; 2] = ["devices=2", "devices=2;peers=none"];

#[test]
fn programs_on_like_cuda_end_as_on_the_cuda_simulator() {
    let library = device_ipc_sim_cuda::library().expect("the simulator was built");
    agree("cuda", (device_ipc::cuda::LIBRARY_VARIABLE, library), device_ipc_sim_cuda::VARIABLE);
}

#[test]
fn programs_on_like_ascend_end_as_on_the_ascend_simulator() {
    let library = device_ipc_sim_ascendcl::library().expect("the simulator was built");
    let variable = device_ipc_sim_ascendcl::MACHINE_VARIABLE;
    agree("ascend", (device_ipc::ascend::LIBRARY_VARIABLE, library), variable);
}

/// Runs all programs on the simulator of a vendor, which is loaded from the library of a variable, and on the mock.
fn agree(vendor: &str, library: (&'static str, PathBuf), machine_variable: &'static str) {
    for machine in MACHINES {
        let simulator = [
            ("DEVICE_IPC_BACKEND", vendor.to_owned()),
            (library.0, library.1.to_str().expect("a plain path").to_owned()),
            (machine_variable, machine.to_owned()),
        ];
        let mock = [
            ("DEVICE_IPC_BACKEND", "mock".to_owned()),
            ("DEVICE_IPC_MOCK", format!("{machine};like={vendor}")),
        ];
        compare(machine, &outcomes(&simulator), &outcomes(&mock));
    }
}

fn compare(machine: &str, simulator: &BTreeMap<String, String>, mock: &BTreeMap<String, String>) {
    let programs: BTreeSet<_> = simulator.keys().chain(mock.keys()).collect();
    let outcome =
        |of: &BTreeMap<String, String>, program| of.get(program).cloned().unwrap_or("did not run".into());
    let differences: Vec<_> = programs
        .iter()
        .filter(|program| simulator.get(**program) != mock.get(**program))
        .map(|program| {
            let (on_simulator, on_mock) = (outcome(simulator, *program), outcome(mock, *program));
            format!("{program}\n    simulator: {on_simulator}\n    mock:      {on_mock}")
        })
        .collect();
    let (count, all) = (differences.len(), programs.len());
    assert!(count == 0, "{count} of {all} programs differ on {machine}:\n{}", differences.join("\n"));
    assert!(all >= PROGRAMS, "only {all} programs ran on {machine}: {programs:#?}");
}

/// Runs all programs on a machine, in a process of their own.
fn outcomes(machine: &[(&'static str, String)]) -> BTreeMap<String, String> {
    let mut command = command_of_test(concat!(module_path!(), "::programs::role"));
    for variable in ["DEVICE_IPC_MOCK", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"] {
        command.env_remove(variable);
    }
    command.envs(machine.iter().map(|(name, value)| (*name, value)));
    let process = Process::start(&format!("the programs on {machine:?}"), &mut command);
    let mut outcomes = BTreeMap::new();
    loop {
        let line =
            process.line(|line| (line == "end" || line.starts_with("outcome\t")).then(|| line.to_owned()));
        let mut fields = line.split('\t').skip(1);
        let (Some(program), Some(outcome)) = (fields.next(), fields.next()) else { break };
        assert!(outcomes.insert(program.to_owned(), outcome.to_owned()).is_none(), "{program} ran twice");
    }
    process.finish();
    outcomes
}
