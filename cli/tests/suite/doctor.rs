//! `doctor` on this machine with the mock. Unit tests cover the individual checks.

use crate::support::{Terminal, device_ipc};
use serde_json::Value;

fn doctor(arguments: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = device_ipc();
    command
        .arg("doctor")
        .args(arguments)
        .env("DEVICE_IPC_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
        .env("DEVICE_IPC_ASCEND_LIBRARY", "/nowhere/libascendcl.so")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("ASCEND_RT_VISIBLE_DEVICES")
        .envs(environment.iter().copied());
    let result = Terminal::start(command).wait();
    (result.status.code(), result.out)
}

fn checks(text: &str) -> Vec<Value> {
    let report: Value = serde_json::from_str(text).expect("JSON");
    report["checks"].as_array().expect("a list").clone()
}

fn verdicts<'a>(checks: &'a [Value], name: &str) -> Vec<&'a str> {
    checks.iter().filter(|one| one["check"] == name).filter_map(|one| one["verdict"].as_str()).collect()
}

#[test]
fn round_trips_cover_each_device_and_pair() {
    let (code, text) = doctor(&["--backend", "mock", "--json"], &[]);
    assert_eq!(code, Some(0), "{text}");
    let checks = checks(&text);
    assert_eq!(verdicts(&checks, "round trip"), ["ok"; 4], "{text}");
    assert_eq!(verdicts(&checks, "sealed memory (memfd_create)"), ["ok"]);
    assert_eq!(verdicts(&checks, "two devices of one process"), ["ok"], "a backend that is named is probed");
    let (code, text) =
        doctor(&["--backend", "mock", "--quick"], &[("DEVICE_IPC_MOCK", "devices=2;peers=0>1")]);
    assert_eq!(code, Some(0));
    assert!(
        !text.contains("round trip") && text.contains("no peer access between devices: 1 -> 0"),
        "{text}"
    );
}

#[test]
fn problem_has_a_reason_and_sets_the_exit_code() {
    let broken = [("DEVICE_IPC_MOCK", "devices=1;fault=open:1")];
    let (code, text) = doctor(&["--backend", "mock", "--json"], &broken);
    assert_eq!(code, Some(1), "{text}");
    let checks = checks(&text);
    let trip = checks.iter().find(|one| one["check"] == "round trip").expect("the round trip was made");
    assert!(trip["found"].as_str().is_some_and(|found| found.contains("injected fault")), "{trip}");
    assert!(
        trip["change"].as_str().is_some_and(|change| change.contains("device-ipc demo --backend mock")),
        "{trip}"
    );

    let (code, text) = doctor(&["--quick", "--backend", "cuda"], &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("problem  library of cuda") && text.contains("/nowhere/libcuda.so.1"), "{text}");

    let (code, text) = doctor(&["--quick"], &[("CUDA_VISIBLE_DEVICES", "-1")]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("hides every GPU") && text.contains("-> unset CUDA_VISIBLE_DEVICES"), "{text}");

    let (code, text) = doctor(&["--quick"], &[("DEVICE_IPC_BACKEND", "cdua")]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("\"cdua\" is not a backend") && text.contains("-> unset DEVICE_IPC_BACKEND"),
        "{text}"
    );

    let (code, text) = doctor(&["--quick"], &[("DEVICE_IPC_SOCKET_DIR", "/nowhere/sockets")]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("-> mkdir -p /nowhere/sockets"), "{text}");
}

/// The loader blocks for ever on a pipe without a writer, like in a driver that hangs.
#[test]
fn hanging_library_is_a_problem_and_other_checks_run() {
    let directory = crate::support::Directory::new();
    let pipe = directory.path("libcuda.so.1");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
    let library = pipe.to_str().expect("a path in UTF-8");
    let (code, text) = doctor(&["--quick", "--timeout", "1s"], &[("DEVICE_IPC_CUDA_LIBRARY", library)]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("problem  library of cuda") && text.contains("timed out after 1s"), "{text}");
    assert!(text.contains("ok       mock"), "{text}");
}

#[test]
fn unknown_backend_is_an_error() {
    let mut command = device_ipc();
    command.args(["doctor", "--backend", "acme"]);
    assert!(Terminal::start(command).wait().usage().contains("[possible values: cuda, ascend, mock]"));
}
