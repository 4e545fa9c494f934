//! Programs that load the simulator.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use device_ipc_sim_cuda::{VARIABLE, install, install_without};
use device_ipc_test_process::output_of;

/// A folder with the simulator under the names that the dynamic linker searches.
pub(crate) struct Installed(tempfile::TempDir);

impl Installed {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        install(folder.path()).expect("the library was built");
        Self(folder)
    }

    pub(crate) fn without(functions: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        install_without(folder.path(), functions).expect("the library was built");
        Self(folder)
    }

    pub(crate) fn library(&self) -> String {
        self.folder().join("libcuda.so.1").to_str().expect("a path in UTF-8").to_owned()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.0.path()
    }

    /// Creates a command that loads the simulator as the driver.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>, machine: &str) -> Command {
        self.prepare(Command::new(program), machine)
    }

    /// Makes a command load the simulator as the driver.
    pub(crate) fn prepare(&self, mut command: Command, machine: &str) -> Command {
        command
            .env("LD_LIBRARY_PATH", self.folder())
            .env("DEVICE_IPC_CUDA_LIBRARY", self.folder().join("libcuda.so.1"))
            .env(VARIABLE, machine)
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("DEVICE_IPC_BACKEND");
        command
    }
}

/// Runs tests of this program in a process that loads the simulator. They skip themselves where there is no driver,
/// which is an error here.
pub(crate) fn run_tests(module: &str, machine: &str) {
    let installed = Installed::new();
    let mut command = installed.command(std::env::current_exe().expect("this program"), machine);
    command.args([&format!("{module}::"), "--nocapture", "--test-threads=1"]);
    let (success, text) = output_of(command, Duration::from_secs(240));
    assert!(success, "{text}");
    assert!(!text.contains("skipped: "), "{text}");
    assert!(text.contains("test result: ok") && !text.contains(" 0 passed"), "{text}");
}
