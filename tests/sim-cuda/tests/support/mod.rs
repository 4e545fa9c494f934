//! Programs that load the simulator.

#![allow(dead_code, reason = "each test file takes what it needs")]

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use device_ipc_sim_cuda::{VARIABLE, install, install_without};

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
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", self.folder())
            .env("DEVICE_IPC_CUDA_LIBRARY", self.folder().join("libcuda.so.1"))
            .env(VARIABLE, machine)
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("DEVICE_IPC_BACKEND");
        command
    }
}

/// Runs a command until it exits, or kills it after `limit`. Returns its output, its errors, and whether it
/// succeeded.
pub(crate) fn finish(mut command: Command, limit: Duration) -> (bool, String) {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // In a separate process group, so that its children are killed too.
        .process_group(0)
        .spawn()
        .expect("it starts");
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let readers =
        [std::thread::spawn(move || text_of(&mut out)), std::thread::spawn(move || text_of(&mut err))];
    let end = Instant::now() + limit;
    let success = loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            break status.success();
        }
        if Instant::now() >= end {
            kill_group(&child);
            child.wait().expect("it is reaped");
            break false;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    kill_group(&child);
    let text: Vec<String> = readers.map(|reader| reader.join().expect("it reads")).into();
    (success, text.concat())
}

fn kill_group(child: &Child) {
    let group = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw).expect("a pid");
    // The group may be empty.
    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
}

fn text_of(from: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).expect("it can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs tests of this program in a process that loads the simulator. They skip themselves where there is no driver,
/// which is an error here.
pub(crate) fn run_tests(module: &str, machine: &str) {
    let installed = Installed::new();
    let mut command = installed.command(std::env::current_exe().expect("this program"), machine);
    command.args([&format!("{module}::"), "--nocapture", "--test-threads=1"]);
    let (success, text) = finish(command, Duration::from_secs(240));
    assert!(success, "{text}");
    assert!(!text.contains("skipped: "), "{text}");
    assert!(text.contains("test result: ok") && !text.contains(" 0 passed"), "{text}");
}

/// Runs another test of this program: included tests start processes of this program by their own names.
pub(crate) fn become_test(name: &str) -> ! {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    let error = command.args(["--exact", name, "--ignored", "--nocapture"]).exec();
    panic!("cannot become {name}: {error}")
}
