//! What the tests of the backend share: the simulator, described and put where the backend loads it, and processes of
//! which each sees a machine of its own.

#![allow(dead_code, reason = "not every test needs all of it")]

mod peer;
mod raw;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use device_ipc_ascend::{LIBRARY_VARIABLE, LoadOptions};
use device_ipc_sim_ascendcl::{Cann, MACHINE_VARIABLE, VISIBLE_VARIABLE, install};

use peer::within;
#[allow(unused_imports, reason = "not every test needs both")]
pub(crate) use peer::{Peer, Told};
#[allow(unused_imports, reason = "not every test makes raw calls")]
pub(crate) use raw::Raw;

/// Says that the conformance suite is to run on the machine's own ACL.
const HARDWARE_VARIABLE: &str = "DEVICE_IPC_ASCEND_HARDWARE";
/// Says what a process that a test has started is to do.
const ROLE_VARIABLE: &str = "DEVICE_IPC_ASCEND_ROLE";

/// What a process says when it has run its scene to the end.
const PLAYED: &str = "the scene was played";

/// How long a test may take.
const DEADLINE: Duration = Duration::from_secs(100);

/// Are the tests to run on the machine's own ACL, or on the library that the environment names?
pub(crate) fn hardware() -> bool {
    let set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    [HARDWARE_VARIABLE, LIBRARY_VARIABLE].iter().any(set)
}

/// The simulator as a machine that this text describes, with the functions of this CANN. Says which machine it is by the
/// environment of this process, so a process has one of them.
pub(crate) fn simulated(machine: &str, cann: Cann) -> LoadOptions {
    static MACHINE: OnceLock<String> = OnceLock::new();
    let description = format!("{machine};cann={}", cann.name());
    let first = MACHINE.get_or_init(|| {
        // SAFETY: called before there is a second thread that reads the environment; the simulator reads it when it is
        // first called.
        unsafe { std::env::set_var(MACHINE_VARIABLE, &description) };
        description.clone()
    });
    assert_eq!(*first, description, "a process has one machine");
    LoadOptions::new().library(library_of(cann))
}

/// The simulator with the functions of this CANN. Each version is made once for all tests, and left as it is.
pub(crate) fn library_of(cann: Cann) -> PathBuf {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cann-{}", cann.name()));
    std::fs::create_dir_all(&directory).expect("the tests' directory can be written");
    let library = directory.join("libascendcl.so");
    let built = device_ipc_sim_ascendcl::library().expect("Cargo builds what tests depend on");
    let made = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    if made(&library).is_none_or(|time| Some(time) < made(&built)) {
        install(&directory, cann).expect("the simulator can be copied");
    }
    library
}

/// Was the program built on this machine? From a bundle it runs where the simulator is not.
pub(crate) fn has_simulator() -> bool {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).is_dir();
    if !built {
        eprintln!("skipped: the simulator of ACL is where the tests were built");
    }
    built
}

/// What a process that a test starts does, by its name.
pub(crate) type Role = (&'static str, fn(&Told));

/// A test whose processes each see a machine that the test describes.
pub(crate) struct Scene {
    /// The name of the test, by which its processes find it again.
    pub(crate) name: &'static str,
    /// The machine, in the words of `DEVICE_IPC_SIM_ASCEND`.
    pub(crate) machine: &'static str,
    /// The version of CANN.
    pub(crate) cann: Cann,
    /// More of the environment.
    pub(crate) environment: &'static [(&'static str, &'static str)],
}

impl Scene {
    /// With CANN 9.1 on this machine.
    pub(crate) const fn on(name: &'static str, machine: &'static str) -> Self {
        Self { name, machine, cann: Cann::V9_1, environment: &[] }
    }

    /// With this CANN.
    pub(crate) const fn cann(mut self, cann: Cann) -> Self {
        self.cann = cann;
        self
    }

    /// With these variables set.
    pub(crate) const fn environment(mut self, environment: &'static [(&'static str, &'static str)]) -> Self {
        self.environment = environment;
        self
    }

    /// Runs `main` in a process of its own, which may start others that run a role.
    pub(crate) fn play(&self, main: fn(&Self), roles: &[Role]) {
        match std::env::var(ROLE_VARIABLE) {
            // A test of several scenes: this process belongs to another one.
            Ok(_) if std::env::var(MACHINE_VARIABLE).ok() != Some(self.description()) => {}
            Ok(role) if role == "main" => {
                main(self);
                println!("{PLAYED}");
            }
            Ok(role) => match roles.iter().find(|(name, _)| *name == role) {
                Some((_, play)) => play(&Told),
                None => panic!("{} has no role {role:?}", self.name),
            },
            Err(_) if has_simulator() => {
                let said = within(self.command("main"), DEADLINE, self.name);
                assert!(said.contains(PLAYED), "{} passed without having run:\n{said}", self.name);
            }
            Err(_) => {}
        }
    }

    /// Starts a process that runs a role of this test.
    pub(crate) fn peer(&self, role: &str) -> Peer {
        Peer::start(self.command(role))
    }

    /// The same, seeing these devices only.
    pub(crate) fn peer_seeing(&self, role: &str, visible: &str) -> Peer {
        let mut command = self.command(role);
        command.env(VISIBLE_VARIABLE, visible);
        Peer::start(command)
    }

    /// Runs a role to its end, and gives all that its process said.
    pub(crate) fn output_of(&self, role: &str) -> String {
        within(self.command(role), DEADLINE, role)
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
