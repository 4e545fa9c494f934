//! The program as its users run it, on the mock.

use std::process::{Command, Output};

use serde_json::Value;

fn device_ipc(machine: &str, arguments: &[&str]) -> Output {
    // On a machine without cargo the program lies elsewhere.
    let program = std::env::var("DEVICE_IPC_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_device-ipc").into());
    Command::new(program)
        .args(arguments)
        .env("DEVICE_IPC_MOCK", machine)
        .env_remove("DEVICE_IPC_BACKEND")
        .output()
        .expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints text")
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the program prints JSON")
}

#[test]
fn the_demo_shares_on_one_device_and_says_so() {
    let output = device_ipc("devices=1", &["demo", "--backend", "mock"]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    for said in ["[sender]", "[receiver]", "got tensor: shape=[4, 5] device=mock:0", "mean delta = 1.000000"]
    {
        assert!(out.contains(said), "{said:?} is missing in:\n{out}");
    }
}

#[test]
fn the_demo_opens_the_tensor_on_another_device() {
    let report = json(&device_ipc("devices=2", &["demo", "--backend=mock", "--from=0", "--to=1", "--json"]));
    assert_eq!(report["shared"], true);
    assert_eq!((report["from"].as_u64(), report["to"].as_u64()), (Some(0), Some(1)));
    assert_eq!(report["mean_received"], report["mean_before"]);
    assert_ne!(report["sender_pid"], report["receiver_pid"]);
}

#[test]
fn the_demo_fails_when_the_bytes_do_not_prove_it() {
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
fn the_demo_says_which_cards_cannot_reach_each_other() {
    let output = device_ipc("devices=2;peers=none", &["demo", "--backend=mock", "--to=1"]);
    let err = text(&output.stderr);
    assert!(!output.status.success());
    assert!(err.contains("no peer access between them"), "{err}");
}

#[test]
fn the_demo_falls_back_to_the_mock_where_there_is_nothing_else() {
    let output =
        Command::new(std::env::var("DEVICE_IPC_BIN").unwrap_or(env!("CARGO_BIN_EXE_device-ipc").into()))
            .arg("demo")
            .env("DEVICE_IPC_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
            .env_remove("DEVICE_IPC_BACKEND")
            .env_remove("DEVICE_IPC_MOCK")
            .output()
            .expect("the program runs");
    let out = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(out.contains("runs on the mock") && out.contains("/nowhere/libcuda.so.1"), "{out}");
}

#[test]
fn a_device_or_a_backend_that_is_not_there_is_named() {
    for (arguments, said) in [
        (["demo", "--backend=mock", "--from=5"], "--from 5: the backend mock has 2 device(s)"),
        (["demo", "--backend=mock", "--to=2"], "--to 2: the backend mock has 2 device(s)"),
        (
            ["demo", "--backend=acme", "--to=0"],
            "no backend is called \"acme\"; there are: cuda, ascend, mock",
        ),
        (["devices", "--backend=acme", "--json"], "no backend is called \"acme\""),
    ] {
        let output = device_ipc("", &arguments);
        let err = text(&output.stderr);
        assert!(!output.status.success() && err.contains(said), "{arguments:?}: {err}");
    }
}

#[test]
fn a_machine_that_cannot_be_described_is_an_error_with_the_variable() {
    let output = device_ipc("devices=many", &["demo", "--backend", "mock"]);
    let err = text(&output.stderr);
    assert!(!output.status.success() && err.contains("DEVICE_IPC_MOCK") && err.contains("'many'"), "{err}");
}

#[test]
fn devices_lists_every_backend_or_why_not() {
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

/// A demonstration whose receiver waits, so that there is something to list.
fn sharing(during: impl FnOnce(u32)) {
    use device_ipc::{Ipc, mock::MockBackend};

    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let buffer = ipc.allocate(0, 4096).expect("memory");
    let share = ipc.share(buffer).start().expect("an export");
    let mapping = ipc.open(share.descriptor()).at_home().expect("a mapping");
    during(std::process::id());
    drop(mapping);
    share.close(std::time::Duration::from_secs(10)).expect("nobody holds it");
}

#[test]
fn ps_lists_exports_and_who_holds_them_and_no_secret() {
    sharing(|pid| {
        let output = device_ipc("", &["ps", "--json"]);
        let report = json(&output);
        let processes = report["processes"].as_array().expect("a list");
        let ours = processes.iter().find(|one| one["pid"] == pid).expect("this process is listed");
        let export = &ours["exports"][0];
        assert_eq!((export["bytes"].as_u64(), export["held_by"].as_u64()), (Some(4096), Some(1)), "{export}");
        assert_eq!(export["holders"][0]["pid"], pid);
        assert!(!text(&output.stdout).contains("token"), "{export}");
        let table = text(&device_ipc("", &["ps"]).stdout);
        assert!(
            table.contains(&pid.to_string()) && table.contains("mock") && table.contains("4096"),
            "{table}"
        );
    });
}
