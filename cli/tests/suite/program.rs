//! The commands `demo`, `devices` and `ps` on the mock.

use std::process::Output;

use serde_json::Value;

use crate::support;

fn device_ipc(machine: &str, arguments: &[&str]) -> Output {
    let mut command = support::device_ipc();
    command.args(arguments).env("DEVICE_IPC_MOCK", machine).env_remove("DEVICE_IPC_BACKEND");
    command.output().expect("running the program")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the output is UTF-8")
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the output is JSON")
}

#[test]
fn demo_prints_a_transcript() {
    let output = device_ipc("devices=1", &["demo", "--backend", "mock"]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    for expected in
        ["[sender]", "[receiver]", "got tensor: shape=[4, 5] device=mock:0", "mean delta = 1.000000"]
    {
        assert!(out.contains(expected), "{expected:?} not found in:\n{out}");
    }
}

#[test]
fn demo_opens_the_tensor_on_another_device() {
    let report = json(&device_ipc("devices=2", &["demo", "--backend=mock", "--from=0", "--to=1", "--json"]));
    assert_eq!(report["shared"], true);
    assert_eq!((report["from"].as_u64(), report["to"].as_u64()), (Some(0), Some(1)));
    assert_eq!(report["mean_received"], report["mean_before"]);
    assert_ne!(report["sender_pid"], report["receiver_pid"]);
}

#[test]
fn demo_fails_on_injected_faults() {
    for fault in ["kernel", "open", "export", "copy", "read"] {
        let output = device_ipc(&format!("fault={fault}:1"), &["demo", "--backend", "mock"]);
        // The demo makes no device-to-device copy, so a fault there changes nothing.
        assert_eq!(output.status.success(), fault == "copy", "{fault}: {}", text(&output.stdout));
        if fault != "copy" {
            assert!(text(&output.stderr).contains("injected fault"), "{fault}: {}", text(&output.stderr));
        }
    }
}

#[test]
fn demo_reports_missing_peer_access() {
    let output = device_ipc("devices=2;peers=none", &["demo", "--backend=mock", "--to=1"]);
    let err = text(&output.stderr);
    assert!(!output.status.success());
    assert!(err.contains("no peer access; open it"), "{err}");
}

#[test]
fn demo_falls_back_to_the_mock() {
    let mut command = support::device_ipc();
    command.arg("demo").env("DEVICE_IPC_CUDA_LIBRARY", "/nowhere/libcuda.so.1");
    command.env_remove("DEVICE_IPC_BACKEND").env_remove("DEVICE_IPC_MOCK");
    let output = command.output().expect("running the program");
    let out = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(out.contains("runs on the mock") && out.contains("/nowhere/libcuda.so.1"), "{out}");
}

#[test]
fn unknown_device_or_backend_is_an_error() {
    for (arguments, expected) in [
        (
            ["demo", "--backend=mock", "--from=5"],
            "--from 5 is out of range: the backend mock has 2 device(s)",
        ),
        (["demo", "--backend=mock", "--to=2"], "--to 2 is out of range: the backend mock has 2 device(s)"),
        (["demo", "--backend=acme", "--to=0"], "[possible values: cuda, ascend, mock]"),
        (["devices", "--backend=acme", "--json"], "invalid value 'acme'"),
    ] {
        let output = device_ipc("", &arguments);
        let err = text(&output.stderr);
        assert!(!output.status.success() && err.contains(expected), "{arguments:?}: {err}");
    }
}

#[test]
fn invalid_machine_variable_is_an_error() {
    let output = device_ipc("devices=many", &["demo", "--backend", "mock"]);
    let err = text(&output.stderr);
    assert!(!output.status.success() && err.contains("DEVICE_IPC_MOCK") && err.contains("'many'"), "{err}");
}

#[test]
fn devices_lists_every_backend() {
    let report = json(&device_ipc("devices=2;peers=0>1", &["devices", "--json"]));
    let backends = report["backends"].as_array().expect("a list");
    let named =
        |name: &str| backends.iter().find(|one| one["name"] == name).expect("every backend is listed");
    let cuda = named("cuda");
    assert!(
        cuda["available"] == true || cuda["why_not"].as_str().is_some_and(|why| !why.is_empty()),
        "{cuda}"
    );
    let mock = named("mock");
    assert_eq!(mock["devices"].as_array().map(Vec::len), Some(2));
    assert_eq!(mock["peer_access"], serde_json::json!([[true, true], [false, true]]));
    assert_ne!(mock["devices"][0]["identity"], mock["devices"][1]["identity"]);

    let table = text(&device_ipc("devices=2", &["devices", "--backend", "mock"]).stdout);
    assert!(table.contains("Mock Device 1") && !table.contains("cuda"), "{table}");
}

/// Runs a function while this process has an export with one holder.
fn with_export(run: impl FnOnce(u32)) {
    use device_ipc::{Ipc, mock::MockBackend};

    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let buffer = ipc.allocate(0, 4096).expect("memory");
    let share = ipc.share(buffer).start().expect("an export");
    let mapping = ipc.open(share.descriptor()).at_home().expect("a mapping");
    run(std::process::id());
    drop(mapping);
    share.close(std::time::Duration::from_secs(10)).expect("no process holds it");
}

#[test]
fn ps_lists_exports_and_holders_without_tokens() {
    with_export(|pid| {
        let output = device_ipc("", &["ps", "--timeout", "30s", "--json"]);
        let report = json(&output);
        let processes = report["processes"].as_array().expect("a list");
        let ours = processes.iter().find(|one| one["pid"] == pid).expect("this process is listed");
        let export = &ours["exports"][0];
        assert_eq!((export["bytes"].as_u64(), export["held_by"].as_u64()), (Some(4096), Some(1)), "{export}");
        assert_eq!(export["holders"][0]["pid"], pid);
        assert!(!text(&output.stdout).contains("token"), "{export}");
        let table = text(&device_ipc("", &["ps", "--timeout", "30s"]).stdout);
        assert!(
            table.contains(&pid.to_string()) && table.contains("mock") && table.contains("4096"),
            "{table}"
        );
    });
}
