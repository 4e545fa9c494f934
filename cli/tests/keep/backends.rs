//! The keeper on the simulated drivers.

use std::path::Path;
use std::process::Command;

use super::{model, unique};
use crate::support::{Directory, Terminal, device_ipc};

/// Returns a command on the simulator of CUDA; `None` where the tests were not built, because it is missing there.
fn on_cuda(directory: &Directory, arguments: &[&str]) -> Option<Command> {
    let driver = directory.path("driver");
    std::fs::create_dir_all(&driver).expect("a directory");
    let installed = driver.join("libcuda.so.1");
    if !installed.exists()
        && let Err(error) = device_ipc_sim_cuda::install(&driver)
    {
        eprintln!("skipped: the simulator of CUDA exists only where the tests were built ({error})");
        return None;
    }
    let mut command = device_ipc();
    command
        .args(arguments)
        .args(["--backend", "cuda"])
        .env_remove("DEVICE_IPC_BACKEND")
        .env("LD_LIBRARY_PATH", &driver)
        .env("DEVICE_IPC_CUDA_LIBRARY", installed)
        .env(device_ipc_sim_cuda::VARIABLE, "devices=2")
        .env_remove("CUDA_VISIBLE_DEVICES");
    Some(command)
}

/// Returns a command on the simulator of ACL.
fn on_ascend(arguments: &[&str]) -> Option<Command> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("keep-ascend");
    if std::fs::create_dir_all(&directory).is_err() {
        eprintln!("skipped: the simulator of ACL exists only where the tests were built");
        return None;
    }
    let library = device_ipc_sim_ascendcl::install(&directory, device_ipc_sim_ascendcl::Cann::V9_1);
    let mut command = device_ipc();
    command
        .args(arguments)
        .args(["--backend", "ascend"])
        .env_remove("DEVICE_IPC_BACKEND")
        .env(device_ipc_sim_ascendcl::MACHINE_VARIABLE, "soc=910b;devices=2")
        .env("DEVICE_IPC_ASCEND_LIBRARY", library.expect("the simulator can be copied"));
    Some(command)
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
    let Some(refused) = on_ascend(&["keep", &file, "--name", &name]) else { return };
    let error = Terminal::start(refused).wait().bad();
    assert!(error.contains("read-only") && error.contains("--writable"), "{error}");
    let run = |arguments: &[&str]| Terminal::start(on_ascend(arguments).expect("installed"));
    let mut keeper = run(&["keep", &file, "--name", &name, "--writable"]);
    assert!(keeper.until("keeps version 1").contains("ascend, read-write"));
    let read = run(&["attach", &format!("keeper:{name}"), "read", "--tensor", "a"]).wait().good();
    assert!(read.contains("mean=1.5"), "{read}");
    let mut next = run(&["keep", "--hand-over", "--name", &name]);
    next.until("keeps version 1");
    keeper.wait().good();
}
