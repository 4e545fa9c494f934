//! The program with the backend acme: it lists, demonstrates and diagnoses a backend that its own sources do not name.

use std::process::Command;
use std::time::Duration;

use device_ipc_test_process::output_of;

/// Runs the program. Returns whether it succeeded, and what it printed.
fn acme_ipc(arguments: &[&str], hidden: bool) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_acme-ipc"));
    command.args(arguments).env_remove("DEVICE_IPC_BACKEND").env_remove("ACME_VISIBLE_DEVICES");
    if hidden {
        command.env("ACME_VISIBLE_DEVICES", "1");
    }
    output_of(command, Duration::from_secs(120))
}

#[track_caller]
fn printed(arguments: &[&str]) -> String {
    let (succeeded, text) = acme_ipc(arguments, false);
    assert!(succeeded, "{text}");
    text
}

#[test]
fn backend_is_listed_and_selected_by_name() {
    assert!(printed(&["devices", "--backend", "acme"]).contains("Acme shared memory"));
    let demo = printed(&["demo", "--backend", "acme", "--json"]);
    assert!(demo.contains("\"shared\": true") && demo.contains("\"simulated\": false"), "{demo}");
    let (_, unknown) = acme_ipc(&["devices", "--backend", "acne"], false);
    assert!(unknown.contains("acme"), "{unknown}");
}

#[test]
fn doctor_has_the_section_of_the_backend() {
    let report = printed(&["doctor", "--backend", "acme"]);
    assert!(
        report.contains("ok       library of acme") && report.contains("ok       Acme shared memory"),
        "{report}"
    );
    assert!(report.contains("ok       round trip: acme: device 0 to device 0"), "{report}");
    let (succeeded, report) = acme_ipc(&["doctor", "--backend", "acme", "--quick"], true);
    assert!(!succeeded && report.contains("-> unset ACME_VISIBLE_DEVICES"), "{report}");
}
