//! Shared code of the tests: the simulator, configured and installed where the backend loads it, and processes that
//! each see a separate machine.

#![allow(dead_code, reason = "not every test needs all of it")]

mod raw;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use device_ipc_ascend::{LIBRARY_VARIABLE, LoadOptions};
use device_ipc_sim_ascendcl::{Cann, MACHINE_VARIABLE, VISIBLE_VARIABLE, install};
use device_ipc_test_process::{Process, output_of};

#[allow(unused_imports, reason = "not every test makes raw calls")]
pub(crate) use raw::Raw;

/// The environment variable that selects the machine's ACL for the conformance suite.
const HARDWARE_VARIABLE: &str = "DEVICE_IPC_ASCEND_HARDWARE";
/// The environment variable with the role of a process that a test started.
const ROLE_VARIABLE: &str = "DEVICE_IPC_ASCEND_ROLE";

/// The message of a process that has completed its scene.
const PLAYED: &str = "the scene was played";

/// The timeout of a test.
const DEADLINE: Duration = Duration::from_secs(100);

/// Returns whether the tests run on the machine's ACL, or on a library in the environment.
pub(crate) fn hardware() -> bool {
    let set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    [HARDWARE_VARIABLE, LIBRARY_VARIABLE].iter().any(set)
}

/// Installs the simulator of a described machine, with the functions of this CANN. Sets the machine in the environment
/// of this process, so a process has one machine.
pub(crate) fn simulated(machine: &str, cann: Cann) -> LoadOptions {
    static MACHINE: OnceLock<String> = OnceLock::new();
    let description = format!("{machine};cann={}", cann.name());
    let first = MACHINE.get_or_init(|| {
        // SAFETY: called before a second thread reads the environment; the simulator reads it in its first call.
        unsafe { std::env::set_var(MACHINE_VARIABLE, &description) };
        description.clone()
    });
    assert_eq!(*first, description, "a process has one machine");
    LoadOptions::new().library(library_of(cann))
}

/// Returns the simulator with the functions of this CANN. Each version is created once for all tests.
pub(crate) fn library_of(cann: Cann) -> PathBuf {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let built = device_ipc_sim_ascendcl::library().expect("Cargo builds dependencies of tests");
    let directory = built.with_file_name(format!("cann-{}", cann.name()));
    std::fs::create_dir_all(&directory).expect("the tests' directory can be written");
    let library = directory.join("libascendcl.so");
    let made = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    if made(&library).is_none_or(|time| Some(time) < made(&built)) {
        install(&directory, cann).expect("the simulator can be copied");
    }
    library
}

/// Returns whether the simulator is beside this program, as where it was built.
pub(crate) fn has_simulator() -> bool {
    let built = device_ipc_sim_ascendcl::library().is_ok();
    if !built {
        eprintln!("skipped: the simulator of ACL is where the tests were built");
    }
    built
}

/// A role of a process that a test starts, with its name.
pub(crate) type Role = (&'static str, fn());

/// Returns a [`Scene`] of the test that this stands in, on this machine.
#[allow(unused_macros, reason = "the conformance suite has no scenes")]
macro_rules! scene {
    ($machine:expr $(,)?) => {
        crate::rules::support::Scene::on(device_ipc_test_process::this_test!(), $machine)
    };
}
#[allow(unused_imports, reason = "the conformance suite has no scenes")]
pub(crate) use scene;

/// A test whose processes see a machine that the test describes.
pub(crate) struct Scene {
    /// The name of the test, by which its processes select it.
    pub(crate) name: &'static str,
    /// The machine, in the format of `DEVICE_IPC_SIM_ASCEND`.
    pub(crate) machine: &'static str,
    /// The version of CANN.
    pub(crate) cann: Cann,
    /// Further environment variables.
    pub(crate) environment: &'static [(&'static str, &'static str)],
}

impl Scene {
    /// Returns a scene of the test at this path on this machine, with CANN 9.1.
    pub(crate) fn on(path: &'static str, machine: &'static str) -> Self {
        let (_crate, name) = path.split_once("::").expect("a path from the crate on");
        Self { name, machine, cann: Cann::V9_1, environment: &[] }
    }

    /// Sets the version of CANN.
    pub(crate) const fn cann(mut self, cann: Cann) -> Self {
        self.cann = cann;
        self
    }

    /// Sets environment variables.
    pub(crate) const fn environment(mut self, environment: &'static [(&'static str, &'static str)]) -> Self {
        self.environment = environment;
        self
    }

    /// Runs `main` in a separate process, which may start others that run a role.
    pub(crate) fn play(&self, roles: &[Role], main: fn(&Self)) {
        match std::env::var(ROLE_VARIABLE) {
            // A test of several scenes: this process belongs to another scene.
            Ok(_) if std::env::var(MACHINE_VARIABLE).ok() != Some(self.description()) => {}
            Ok(role) if role == "main" => {
                main(self);
                println!("{PLAYED}");
            }
            Ok(role) => match roles.iter().find(|(name, _)| *name == role) {
                Some((_, play)) => play(),
                None => panic!("{} has no role {role:?}", self.name),
            },
            Err(_) if has_simulator() => {
                let said = self.output_of("main");
                assert!(said.contains(PLAYED), "{} passed without having run:\n{said}", self.name);
            }
            Err(_) => {}
        }
    }

    /// Starts a process that runs a role of this test.
    pub(crate) fn peer(&self, role: &str) -> Process {
        Process::start(role, &mut self.command(role))
    }

    /// Starts a process that runs a role of this test, with these visible devices.
    pub(crate) fn peer_with_visible(&self, role: &str, visible: &str) -> Process {
        Process::start(role, self.command(role).env(VISIBLE_VARIABLE, visible))
    }

    /// Runs a role to completion, and returns the output of its process.
    pub(crate) fn output_of(&self, role: &str) -> String {
        let (success, said) = output_of(self.command(role), DEADLINE);
        assert!(success, "the role {role:?} of {} failed, and had said:\n{said}", self.name);
        said
    }

    fn description(&self) -> String {
        format!("{};cann={}", self.machine, self.cann.name())
    }

    fn command(&self, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("the test has a file"));
        command
            .args(["--exact", self.name, "--nocapture", "--test-threads=1"])
            .env(ROLE_VARIABLE, role)
            .env(MACHINE_VARIABLE, self.description())
            .env(LIBRARY_VARIABLE, library_of(self.cann))
            .env_remove(VISIBLE_VARIABLE)
            .envs(self.environment.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))));
        command
    }
}
