//! The list of probes prints on the simulator what is checked in. The GPU's own output is compared with the same file.
//!
//! After a change that is meant: `cargo test -p device-ipc-sim-cuda --test probes -- --nocapture` prints the new outcome of each
//! probe that differs.

mod support;

use std::time::Duration;

use support::{Installed, finish};

const EXPECTED: &str = include_str!("probes.txt");

/// Lines that are no comments, by the probe's name.
fn outcomes(text: &str) -> Vec<(&str, &str)> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(": ")).collect()
}

#[test]
fn every_probe_has_the_outcome_that_is_checked_in() {
    let installed = Installed::new();
    let mut command = installed.command(env!("CARGO_BIN_EXE_cuda-probes"), "devices=2");
    command.arg(installed.library());
    let (success, text) = finish(command, Duration::from_secs(240));
    assert!(success, "{text}");
    let (expected, found) = (outcomes(EXPECTED), outcomes(&text));
    assert!(expected.len() >= 60, "the list of probes");
    let mut differ = Vec::new();
    for (name, outcome) in &expected {
        match found.iter().find(|(known, _)| known == name) {
            // Where this machine may not make namespaces there is nothing to compare.
            Some((_, now)) if now == outcome || *now == "skipped: unshare is not permitted" => {}
            Some((_, now)) => differ.push(format!("{name}: {now} (expected: {outcome})")),
            None => differ.push(format!("{name}: not printed")),
        }
    }
    let unknown = found
        .iter()
        .filter(|(name, _)| name.contains("::") && !expected.iter().any(|(known, _)| known == name));
    differ.extend(unknown.map(|(name, outcome)| format!("{name}: {outcome} (not in probes.txt)")));
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

#[test]
fn with_one_device_the_probes_that_need_two_say_so() {
    let installed = Installed::new();
    let mut command = installed.command(env!("CARGO_BIN_EXE_cuda-probes"), "devices=1");
    command.arg(installed.library()).args(["--only", "another_device"]);
    let (success, text) = finish(command, Duration::from_secs(60));
    assert!(success && text.lines().count() >= 3, "{text}");
    assert!(text.lines().all(|line| line.ends_with(": skipped: one device")), "{text}");
}
