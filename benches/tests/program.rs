//! `device-ipc-bench` as its users run it, on the mock.

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
        .expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints text")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("the program wrote it")
}

#[test]
fn every_row_is_measured_on_the_mock_with_both_sides_in_one_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let [json, plot, markdown] = ["r.json", "r.svg", "r.md"].map(|name| folder.path().join(name));
    let path = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let files = [path(&json), path(&plot), path(&markdown)];
    let output = bench(&[
        "--backend=mock",
        "--rounds=3",
        "--importers=2",
        "--exports=64",
        "--json",
        &files[0],
        "--plot",
        &files[1],
        "--markdown",
        &files[2],
    ]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let report: Value = serde_json::from_str(&read(&json)).expect("JSON");
    assert_eq!((report["schema"].as_u64(), report["machine"]["hardware"].as_bool()), (Some(1), Some(false)));
    let lines = report["lines"].as_array().expect("lines");
    let listed = text(&bench(&["--list"]).stdout);
    for row in listed.lines().filter_map(|line| line.split_whitespace().next()) {
        let of_row: Vec<&Value> = lines.iter().filter(|line| line["row"] == row).collect();
        assert!(of_row.iter().any(|line| line["ours"]["median"].is_f64()), "{row}: {of_row:#?}");
    }
    for line in lines.iter().filter(|line| line["ratio"].is_object()) {
        assert_eq!(line["ours"]["samples"], 3, "warm-up rounds do not count");
        assert_eq!(line["raw"]["samples"], line["ratio"]["samples"], "both sides of each round: {line}");
    }
    let driver = lines.iter().find(|line| line["row"] == "export").expect("the row");
    assert!(driver["reached"].is_null(), "without hardware nobody can tell: {driver}");
    let again = lines.iter().find(|line| line["row"] == "open-again").expect("the row");
    assert!(again["ratio"].is_object(), "the mock opens a handle more than once, as drivers do: {again}");
    let threads = lines.iter().find(|line| line["unit"] == "count").expect("the threads");
    assert_eq!((threads["ours"]["median"].as_f64(), threads["reached"].as_bool()), (Some(2.0), Some(true)));
    assert!(read(&plot).starts_with("<svg") && read(&plot).contains("open all"), "a picture");
    assert!(read(&markdown).contains("| open-again | one thread |"), "{}", read(&markdown));
}

#[test]
fn a_row_that_is_not_there_is_named_with_those_that_are() {
    let output = bench(&["--row", "opening"]);
    let error = text(&output.stderr);
    assert!(!output.status.success());
    assert!(
        error.contains("--row opening") && error.contains("open-again") && error.contains("copy-peer"),
        "{error}"
    );
}

#[test]
fn a_file_that_cannot_be_written_is_said_before_anything_is_measured() {
    let output = bench(&["--backend=mock", "--json", "/nowhere/r.json"]);
    let error = text(&output.stderr);
    assert!(!output.status.success() && error.contains("writing /nowhere/r.json"), "{error}");
    assert!(output.stdout.is_empty(), "nothing was measured");
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let output = bench(&["--backend=mock", "--other=7"]);
    let error = text(&output.stderr);
    assert!(
        !output.status.success() && error.contains("--other 7") && error.contains("2 device(s)"),
        "{error}"
    );
}

#[test]
fn a_row_that_fails_says_why_and_does_not_stop_the_others() {
    let program = env!("CARGO_BIN_EXE_device-ipc-bench");
    // Only the first process makes so many handles.
    let output = Command::new(program)
        .args(["--backend=mock", "--rounds=1", "--row=export", "--row=footprint"])
        .env("DEVICE_IPC_MOCK", "fault=export:70")
        .output()
        .expect("the program runs");
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(!output.status.success() && error.contains("could not be measured"), "{error}");
    assert!(out.contains("failed:") && out.contains("injected fault"), "{out}");
    assert!(out.contains("start of the library"), "the other row is there: {out}");
}
