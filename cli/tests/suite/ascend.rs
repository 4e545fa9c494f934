//! The program on the simulator of Ascend's ACL.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::{Directory, Terminal};
use device_ipc_sim_ascendcl::{Cann, MACHINE_VARIABLE, install};
use serde_json::Value;

/// Runs the program on a simulated machine; `None` where the tests were not built, because the simulator is missing there.
fn device_ipc(machine: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Option<Output> {
    let output = command(machine, arguments)?.envs(environment.iter().copied()).output();
    Some(output.expect("running the program"))
}

fn command(machine: &str, arguments: &[&str]) -> Option<Command> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if !directory.is_dir() {
        eprintln!("skipped: the simulator of ACL exists only where the tests were built");
        return None;
    }
    let directory = directory.join(format!("ascend-{}", machine.replace([';', '='], "-")));
    std::fs::create_dir_all(&directory).expect("the tests' directory can be written");
    let library = install(&directory, Cann::V9_1).expect("the simulator can be copied");
    let program = std::env::var("DEVICE_IPC_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_device-ipc").into());
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env(MACHINE_VARIABLE, machine)
        .env("DEVICE_IPC_ASCEND_LIBRARY", library)
        .env("DEVICE_IPC_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
        .env_remove("DEVICE_IPC_BACKEND");
    Some(command)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the output is JSON")
}

#[test]
fn demo_opens_the_tensor_on_another_card() {
    let arguments = ["demo", "--backend", "ascend", "--from", "0", "--to", "1", "--json"];
    for allocates in ["key", "shareable"] {
        let environment = [("DEVICE_IPC_ASCEND_ALLOCATE", allocates)];
        let Some(output) = device_ipc("soc=910b;devices=2", &arguments, &environment) else { return };
        let report = json(&output);
        assert_eq!(report["shared"], true, "{report}");
        assert_eq!((report["from"].as_u64(), report["to"].as_u64()), (Some(0), Some(1)));
        assert_eq!(report["mean_received"], report["mean_before"]);
        assert_ne!(report["sender_pid"], report["receiver_pid"]);
    }
}

#[test]
fn demo_selects_ascend_without_gpu() {
    let Some(output) = device_ipc("soc=910_93;devices=1", &["demo"], &[]) else { return };
    let out = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(out.contains("device=ascend:0") && out.contains("mean delta = 1.000000"), "{out}");
}

#[test]
fn demo_reports_the_driver_error_of_a_failed_import() {
    let machine = "soc=910b;devices=2;fault=aclrtIpcMemImportByKey:1:507899";
    let Some(output) = device_ipc(machine, &["demo", "--backend=ascend", "--to=1"], &[]) else { return };
    let err = text(&output.stderr);
    assert!(!output.status.success());
    for expected in ["507899", "DeviceMemory::allocate_as", "plog"] {
        assert!(err.contains(expected), "{expected:?} not found in:\n{err}");
    }
}

#[test]
fn devices_lists_devices_or_the_reason() {
    let arguments = ["devices", "--backend", "ascend", "--json"];
    let Some(output) = device_ipc("soc=310p;devices=2", &arguments, &[]) else { return };
    let report = json(&output);
    let backend = &report["backends"][0];
    assert_eq!(backend["available"], true, "{backend}");
    assert_eq!(backend["devices"].as_array().map(Vec::len), Some(2));
    let Some(output) = device_ipc("stub", &arguments, &[]) else { return };
    let out = text(&output.stdout);
    assert!(out.contains("stub library"), "{out} {}", text(&output.stderr));
}

#[test]
fn tensor_is_shared_with_another_card() {
    let machine = "soc=910b;devices=2";
    let directory = Directory::new();
    let file = directory.text("w.ipc");
    let start = |arguments: &[&str]| command(machine, arguments).map(Terminal::start);
    let Some(mut sender) = start(&["send", "--file", &file, "--receivers", "3"]) else { return };
    sender.until("wrote");
    let run = |arguments: &[&str]| start(arguments).expect("as before").wait().good();
    let received = run(&["recv", "--file", &file, "--device", "1", "--add", "1"]);
    assert!(
        received.contains("device=ascend:1 (across cards)") && received.contains("mean=2.000000"),
        "{received}"
    );
    let at = format!("@{file}");
    assert!(run(&["attach", &at, "add", "3"]).contains("mean=5.000000"));
    assert!(run(&["attach", &at, "--device", "1", "fill", "0"]).contains("mean=0.000000"));
    assert!(sender.wait().good().contains("mean delta=-1.000000"));
}

#[test]
fn doctor_tests_every_card_and_reports_the_stub() {
    let arguments = ["doctor", "--backend", "ascend", "--json"];
    let Some(output) = device_ipc("soc=910b;devices=2", &arguments, &[]) else { return };
    let report = json(&output);
    let trips =
        report["checks"].as_array().expect("a list").iter().filter(|one| one["check"] == "round trip");
    assert_eq!(trips.clone().count(), 4, "{report}");
    assert!(trips.into_iter().all(|trip| trip["verdict"] == "ok"), "{report}");
    let seen: Vec<String> = report["checks"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|one| one["check"] == "Ascend card" || one["check"] == "two devices of one process")
        .map(|one| format!("{} {}", one["verdict"].as_str().unwrap_or_default(), one["found"]))
        .collect();
    for topic in
        ["peer access", "several keys", "words", "aclInit", "key: opened on both", "handle: opened on both"]
    {
        assert!(seen.iter().any(|one| one.starts_with("ok") && one.contains(topic)), "{topic}: {seen:#?}");
    }
    // Unexpected behaviour of a card is a warning with the action to report it.
    let Some(output) = device_ipc("soc=910b;devices=1;host-words", &arguments, &[]) else { return };
    let report = json(&output);
    let differs = |one: &&Value| one["check"] == "Ascend card" && one["verdict"] == "warning";
    let differing: Vec<_> = report["checks"].as_array().expect("a list").iter().filter(differs).collect();
    assert_eq!(differing.len(), 1, "{report}");
    assert!(differing[0]["change"].as_str().is_some_and(|change| change.contains("send us this line")));
    let Some(output) = device_ipc("stub", &["doctor", "--quick"], &[]) else { return };
    let out = text(&output.stdout);
    assert!(output.status.code() == Some(1) && out.contains("problem  library of ascend"), "{out}");
    assert!(out.contains("stub library") && out.contains("devlib"), "{out}");
}
