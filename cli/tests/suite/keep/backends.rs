//! The keeper on the simulated drivers.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;

use super::readers::reader;
use super::{TIMEOUT, model, replace_model, unique};
use crate::support::{Directory, Terminal, device_ipc};

/// Sets the environment of a command to the simulator of CUDA; `None` where the tests were not built, because it is missing there.
fn cuda(directory: &Directory, mut command: Command) -> Option<Command> {
    let driver = directory.path("driver");
    std::fs::create_dir_all(&driver).expect("a directory");
    let installed = driver.join("libcuda.so.1");
    if !installed.exists()
        && let Err(error) = device_ipc_sim_cuda::install(&driver)
    {
        eprintln!("skipped: the simulator of CUDA exists only where the tests were built ({error})");
        return None;
    }
    command
        .env_remove("DEVICE_IPC_BACKEND")
        .env("LD_LIBRARY_PATH", &driver)
        .env("DEVICE_IPC_CUDA_LIBRARY", installed)
        .env(device_ipc_sim_cuda::VARIABLE, "devices=2")
        .env_remove("CUDA_VISIBLE_DEVICES");
    Some(command)
}

/// Sets the environment of a command to the simulator of ACL.
fn ascend(_: &Directory, mut command: Command) -> Option<Command> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("keep-ascend");
    if std::fs::create_dir_all(&directory).is_err() {
        eprintln!("skipped: the simulator of ACL exists only where the tests were built");
        return None;
    }
    let library = device_ipc_sim_ascendcl::install(&directory, device_ipc_sim_ascendcl::Cann::V9_1);
    command
        .env_remove("DEVICE_IPC_BACKEND")
        .env(device_ipc_sim_ascendcl::MACHINE_VARIABLE, "soc=910b;devices=2")
        .env("DEVICE_IPC_ASCEND_LIBRARY", library.expect("the simulator can be copied"));
    Some(command)
}

/// Returns a command of the program on the simulator of CUDA.
fn on_cuda(directory: &Directory, arguments: &[&str]) -> Option<Command> {
    let mut command = device_ipc();
    command.args(arguments).args(["--backend", "cuda"]);
    cuda(directory, command)
}

/// Returns a command of the program on the simulator of ACL.
fn on_ascend(directory: &Directory, arguments: &[&str]) -> Option<Command> {
    let mut command = device_ipc();
    command.args(arguments).args(["--backend", "ascend"]);
    ascend(directory, command)
}

#[test]
fn cuda_weights_are_read_only_and_survive_a_hand_over() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("a", &[1.0, 2.0]), ("b", &[5.0])]);
    let name = unique("cuda");
    let Some(keeper) = on_cuda(&directory, &["keep", &file, "--name", &name, "--device-map", "b=1"]) else {
        return;
    };
    let run = |arguments: &[&str]| Terminal::start(on_cuda(&directory, arguments).expect("installed")).wait();
    let mut first = Terminal::start(keeper);
    assert!(first.until("keeps version 1").contains("2 devices of cuda, read-only"));
    let at = format!("keeper:{name}");
    assert!(run(&["attach", &at, "read", "--tensor", "a"]).good().contains("mean=1.5"));
    assert!(run(&["attach", &at, "read", "--tensor", "b"]).good().contains("device=cuda:1"));
    assert!(run(&["attach", &at, "add", "1", "--tensor", "b"]).bad().contains("read-only"));
    let arguments = ["keep", "--hand-over", "--name", &name];
    let mut second = Terminal::start(on_cuda(&directory, &arguments).expect("installed"));
    assert!(second.until("keeps version 1").contains("2 devices of cuda, read-only"));
    first.wait().good();
    assert!(run(&["attach", &at, "read", "--tensor", "b"]).good().contains("mean=5.0"));
}

#[test]
fn ascend_weights_are_kept_writable_on_request_only() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("a", &[1.0, 2.0])]);
    let name = unique("ascend");
    let Some(refused) = on_ascend(&directory, &["keep", &file, "--name", &name]) else { return };
    let error = Terminal::start(refused).wait().bad();
    assert!(error.contains("read-only") && error.contains("--writable"), "{error}");
    let run = |arguments: &[&str]| Terminal::start(on_ascend(&directory, arguments).expect("installed"));
    let mut keeper = run(&["keep", &file, "--name", &name, "--writable"]);
    assert!(keeper.until("keeps version 1").contains("ascend, read-write"));
    let read = run(&["attach", &format!("keeper:{name}"), "read", "--tensor", "a"]).wait().good();
    assert!(read.contains("mean=1.5"), "{read}");
    let mut next = run(&["keep", "--hand-over", "--name", &name]);
    next.until("keeps version 1");
    keeper.wait().good();
}

/// A simulated machine with a keeper of one tensor, `w`.
struct SimulatedKeeper {
    backend: &'static str,
    set: fn(&Directory, Command) -> Option<Command>,
    directory: Directory,
    file: String,
    name: String,
}

impl SimulatedKeeper {
    fn new(backend: &'static str, set: fn(&Directory, Command) -> Option<Command>) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let directory = Directory::new();
        let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
        let name = unique(&format!("{backend}-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        Self { backend, set, directory, file, name }
    }

    /// Starts a keeper, and waits until it answers. `None` without a simulator.
    fn keep(&self) -> Option<Terminal> {
        // Every backend has memory that can be opened read-write.
        let mut command = device_ipc();
        command.args(["keep", &self.file, "--name", &self.name, "--writable", "--backend", self.backend]);
        let mut keeper = Terminal::start((self.set)(&self.directory, command)?);
        keeper.until("keeps version 1");
        Some(keeper)
    }

    fn program(&self, arguments: &[&str]) -> Terminal {
        let mut command = device_ipc();
        command.args(arguments).args(["--backend", self.backend]);
        Terminal::start((self.set)(&self.directory, command).expect("installed"))
    }

    /// Starts a process that opens the weights, and waits until it has.
    fn reader(&self, version: u64) -> Terminal {
        let command = reader(self.backend, &self.name);
        let mut reader = Terminal::start((self.set)(&self.directory, command).expect("installed"));
        reader.until(&format!("opened version {version}"));
        reader
    }

    /// Starts the program, which reads the tensor; it waits for a keeper.
    fn read(&self) -> Terminal {
        self.program(&["attach", &format!("keeper:{}", self.name), "read", "--tensor", "w"])
    }

    /// Returns the version and the number of readers that the keeper states.
    fn listed(&self) -> (u64, u64) {
        let list: Value =
            serde_json::from_str(&self.program(&["keep", "--list", "--json"]).wait().good()).expect("JSON");
        let keepers = list["keepers"].as_array().expect("a list");
        let keeper = keepers.iter().find(|keeper| keeper["name"] == *self.name).expect("it is listed");
        let number = |field: &str| keeper[field].as_u64().unwrap_or_else(|| panic!("{field} of {keeper}"));
        (number("version"), number("readers"))
    }

    /// Waits until the keeper states this number of readers.
    #[track_caller]
    fn wait_for_readers(&self, count: u64) {
        // The keeper's poller sees closed sockets in its own time.
        let end = Instant::now() + TIMEOUT;
        loop {
            let (_, readers) = self.listed();
            if readers == count {
                return;
            }
            assert!(Instant::now() < end, "{readers} readers, not {count}");
        }
    }
}

fn killed_reader_leaves_no_lease(kept: &SimulatedKeeper) {
    let Some(keeper) = kept.keep() else { return };
    let readers = [kept.reader(1), kept.reader(1)];
    assert_eq!(kept.listed(), (1, 2));
    let pids = readers.each_ref().map(Terminal::pid);
    let [first, second] = readers;
    first.kill();
    kept.wait_for_readers(1);
    second.kill();
    kept.wait_for_readers(0);
    // The weights are as before.
    assert!(kept.read().wait().good().contains("mean=1.0"));
    keeper.signal(Signal::TERM);
    // The lease of the last read may be on its way back, so that its process is listed.
    let stopped = keeper.wait().good();
    assert!(!pids.iter().any(|pid| stopped.contains(&pid.to_string())), "{pids:?}: {stopped}");
}

fn killed_keeper_is_replaced_by_another(kept: &SimulatedKeeper) {
    let Some(keeper) = kept.keep() else { return };
    let mut reader = kept.reader(1);
    let pid = keeper.pid();
    keeper.kill();
    let gone = reader.until("gone");
    assert!(gone.contains("ended") && gone.contains(&pid.to_string()), "{gone}");
    // A process that waits for the name is answered by the next keeper, and so is a later one.
    let waiting = kept.read();
    let _next = kept.keep().expect("installed");
    assert!(waiting.wait().good().contains("mean=1.0"));
    reader.kill();
    let _reader = kept.reader(1);
    assert_eq!(kept.listed(), (1, 1));
}

fn new_version_is_loaded_beside_readers_of_the_former_one(kept: &SimulatedKeeper) {
    let Some(mut keeper) = kept.keep() else { return };
    let mut former = kept.reader(1);
    replace_model(&kept.directory, "m.safetensors", &[("w", &[2.0])]);
    keeper.signal(Signal::HUP);
    keeper.until("keeps version 2");
    former.until("dropped, and has [1.0]");
    let later = kept.reader(2);
    assert!(kept.read().wait().good().contains("mean=2.0"));
    former.kill();
    // The end of the former version leaves the present one as it is.
    kept.wait_for_readers(1);
    assert!(kept.read().wait().good().contains("mean=2.0"));
    later.kill();
}

/// Lists the cases as tests on each simulated driver.
macro_rules! on_each_driver {
    ($($case:ident),+ $(,)?) => {
        mod cuda_driver {
            $(
                #[test]
                fn $case() {
                    super::$case(&super::SimulatedKeeper::new("cuda", super::cuda));
                }
            )+
        }

        mod ascend_driver {
            $(
                #[test]
                fn $case() {
                    super::$case(&super::SimulatedKeeper::new("ascend", super::ascend));
                }
            )+
        }
    };
}

on_each_driver! {
    killed_reader_leaves_no_lease,
    killed_keeper_is_replaced_by_another,
    new_version_is_loaded_beside_readers_of_the_former_one,
}
