//! Processes that run a role of a test: the ignored test `role` of the same module.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use device_ipc_test_process::{Process, command_of_test};

/// The variable that names the role of a process.
const ROLE: &str = "DEVICE_IPC_TEST_ROLE";

/// Returns why CUDA is unavailable, for the message of a skipped test.
pub(crate) fn no_cuda() -> Option<String> {
    device_ipc::backend::Backends::registered().named("cuda").err().map(|reason| reason.to_string())
}

/// Returns the role of this process.
pub(crate) fn role() -> String {
    std::env::var(ROLE).expect("set by the test that starts the role")
}

/// Returns an argument of the role.
pub(crate) fn argument(name: &str) -> String {
    std::env::var(argument_variable(name)).expect("set by the test that starts the role")
}

fn argument_variable(name: &str) -> String {
    format!("DEVICE_IPC_TEST_ARGUMENT_{name}")
}

/// Starts a role of the tests in a module (`module_path!()`) in another process.
pub(crate) fn start(module: &str, role: &str, arguments: &[(&str, &str)]) -> Process {
    let arguments: Vec<_> =
        arguments.iter().map(|(name, value)| (argument_variable(name), value.into())).collect();
    start_with(module, role, &arguments)
}

/// Starts a role of the tests in a module (`module_path!()`) in another process, with these environment variables.
pub(crate) fn start_with(module: &str, role: &str, environment: &[(impl AsRef<OsStr>, OsString)]) -> Process {
    let mut command = command_of_test(&format!("{module}::role"));
    command.env(ROLE, role);
    if let Some(path) = search_path() {
        command.env("LD_LIBRARY_PATH", path);
    }
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    Process::start(role, &mut command)
}

/// cudarc finds libcuda by the dynamic linker alone, which must find the library that the backend loads.
fn search_path() -> Option<OsString> {
    let library = std::env::var_os(device_ipc::cuda::LIBRARY_VARIABLE)?;
    let mut path =
        Path::new(&library).parent().filter(|folder| !folder.as_os_str().is_empty())?.as_os_str().to_owned();
    if let Some(former) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(former);
    }
    Some(path)
}
