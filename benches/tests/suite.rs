//! The program `device-ipc-bench` on the mock, and its unit tests.

#![allow(dead_code, unused_imports, reason = "the program uses the rest")]

#[path = "../src/frame.rs"]
mod frame;
#[path = "../src/line.rs"]
mod line;
#[path = "../src/machine.rs"]
mod machine;
#[path = "../src/peer/mod.rs"]
mod peer;
#[path = "../src/raw/mod.rs"]
mod raw;
#[path = "../src/report.rs"]
mod report;
#[path = "../src/rows/mod.rs"]
mod rows;
#[path = "../src/statistics.rs"]
mod statistics;
#[path = "../src/wait.rs"]
mod wait;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_device-ipc-bench");
    Command::new(program)
        .args(arguments)
        .env("DEVICE_IPC_MOCK", "devices=2")
        .env_remove("DEVICE_IPC_BACKEND")
        .output()
        .expect("running the program")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the output is UTF-8")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("the program wrote the file")
}

#[test]
fn all_rows_are_measured_on_both_sides() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let json = directory.path().join("r.json");
    let output = bench(&[
        "--backend=mock",
        "--rounds=1",
        "--importers=2",
        "--exports=64",
        "--json",
        json.to_str().expect("the path is UTF-8"),
    ]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let report: Value = serde_json::from_str(&read(&json)).expect("JSON");
    assert_eq!((report["schema"].as_u64(), report["machine"]["hardware"].as_bool()), (Some(1), Some(false)));
    let lines = report["lines"].as_array().expect("lines");
    let listed = text(&bench(&["--list"]).stdout);
    for row in listed.lines().filter_map(|line| line.split_whitespace().next()) {
        let of_row: Vec<&Value> = lines.iter().filter(|line| line["row"] == row).collect();
        let needs_nixl = |line: &&Value| {
            line["skipped"]
                .as_str()
                .is_some_and(|reason| reason.starts_with("requires NIXL: library not found"))
        };
        let is_measured = |line: &&Value| line["ours"]["median"].is_f64() || needs_nixl(line);
        assert!(of_row.iter().any(is_measured), "{row}: {of_row:#?}");
    }
    for line in lines.iter().filter(|line| line["ratio"].is_object()) {
        assert_eq!(line["ours"]["samples"], 1, "warm-up rounds are not recorded");
        assert_eq!(line["raw"]["samples"], line["ratio"]["samples"], "both sides of each round: {line}");
    }
    let driver = lines.iter().find(|line| line["row"] == "export").expect("the row");
    assert!(driver["reached"].is_null(), "not judged without hardware: {driver}");
    let again = lines.iter().find(|line| line["row"] == "open-again").expect("the row");
    assert!(again["ratio"].is_object(), "the mock opens a handle more than once, as drivers do: {again}");
    let waits = lines.iter().find(|line| line["unit"] == "count").expect("the waits of hosts");
    assert_eq!((waits["ours"]["median"].as_f64(), waits["reached"].as_bool()), (Some(0.0), Some(true)));
    let table = text(&output.stdout);
    assert!(table.contains("| open-again | one thread |"), "{table}");
}

#[test]
fn invalid_arguments_are_errors_before_the_measurement() {
    for (arguments, named) in [
        (["--row", "opening"], ["--row opening", "open-again"]),
        (["--json", "/nowhere/r.json"], ["cannot write", "/nowhere/r.json"]),
        (["--backend=mock", "--other=7"], ["--other 7", "2 device(s)"]),
    ] {
        let output = bench(&arguments);
        let error = text(&output.stderr);
        assert!(!output.status.success() && named.iter().all(|part| error.contains(part)), "{error}");
        assert!(output.stdout.is_empty(), "nothing was measured");
    }
}

#[test]
fn failed_row_does_not_stop_other_rows() {
    let program = env!("CARGO_BIN_EXE_device-ipc-bench");
    // The fault is injected at the 70th export, which only the first process reaches.
    let output = Command::new(program)
        .args(["--backend=mock", "--rounds=1", "--row=export", "--row=start"])
        .env("DEVICE_IPC_MOCK", "fault=export:70")
        .output()
        .expect("running the program");
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(!output.status.success() && error.contains("row(s) failed"), "{error}");
    assert!(out.contains("failed:") && out.contains("injected fault"), "{out}");
    assert!(out.contains("start of the library"), "the other row is measured: {out}");
}
