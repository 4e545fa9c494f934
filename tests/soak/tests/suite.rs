//! The soak, shortened, on the mock and on the simulated vendors' libraries.

#[allow(dead_code, reason = "the program uses the rest")]
#[path = "../src/sizes.rs"]
mod sizes;

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs all rows and checks the number of lines, one for each process; the program itself limits the time of each step.
fn soak(backend: &str, setting: Option<(&str, PathBuf)>, expected: usize) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_device-ipc-soak"));
    command.args(["--rounds", "150", "--warm-up", "100", "--kill-every", "50"]);
    command.env("DEVICE_IPC_BACKEND", backend).stdin(Stdio::null());
    if let Some((variable, path)) = setting {
        command.env(variable, path);
    }
    let output = command.output().expect("the soak starts");
    let (table, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{table}{errors}");
    assert!(output.status.success(), "{backend} failed:\n{table}\n{errors}");
    let lines = table.lines().filter(|line| line.contains("| flat |")).count();
    assert_eq!(lines, expected, "{backend} printed another number of lines:\n{table}");
}

#[test]
fn mock_processes_stay_flat() {
    soak("mock", None, 19);
}

#[test]
fn simulated_cuda_processes_stay_flat() {
    // As a driver that is installed: cudarc loads it by its name.
    let folder = tempfile::tempdir().expect("a temporary folder");
    device_ipc_sim_cuda::install(folder.path()).expect("the simulator is built with the tests");
    soak("cuda", Some(("LD_LIBRARY_PATH", folder.path().to_owned())), 21);
}

#[test]
fn simulated_ascend_processes_stay_flat() {
    let library = device_ipc_sim_ascendcl::library().expect("the simulator is built with the tests");
    soak("ascend", Some(("DEVICE_IPC_ASCEND_LIBRARY", library)), 17);
}
