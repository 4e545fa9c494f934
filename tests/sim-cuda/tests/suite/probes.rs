//! The probes on the simulator have the checked-in outcomes, which are those of a GPU.
//!
//! After an intended change, `cargo test -p device-ipc-sim-cuda probes:: -- --nocapture` prints the new
//! outcome of each probe that differs.

use std::time::Duration;

use super::support::Installed;
use device_ipc_test_process::output_of;

const EXPECTED: &str = include_str!("../probes.txt");

/// The output of the probes on two H200.
const GPU: &str = include_str!("../probes-h200-580.159.04.txt");
/// The permitted differences: probe, simulator, GPU, reason.
const DIFFERENCES: &str = include_str!("../gpu-differences.txt");
/// The probes that were not run on a GPU, each with the source of its outcome.
const NOT_RUN: &str = include_str!("../probes-not-run.txt");

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty())
}

/// Parses outcomes with the names of the probes.
fn outcomes(text: &str) -> Vec<(&str, &str)> {
    lines(text).filter_map(|line| line.split_once(": ")).collect()
}

/// Parses the lines of a table into fields.
fn table<const N: usize>(text: &str) -> Vec<[&str; N]> {
    let fields = |line| {
        let fields: Vec<&str> = str::split(line, " | ").map(str::trim).collect();
        fields.try_into().unwrap_or_else(|_| panic!("'{line}' has not {N} fields"))
    };
    lines(text).map(fields).collect()
}

fn outcome_of<'a>(outcomes: &[(&str, &'a str)], probe: &str) -> Option<&'a str> {
    outcomes.iter().find(|(name, _)| *name == probe).map(|(_, outcome)| *outcome)
}

/// Returns the errors of the checked-in outcomes, compared with those of a GPU.
fn wrong_with(simulator: &str, gpu: &str, differences: &str, not_run: &str) -> Vec<String> {
    let (simulator, gpu) = (outcomes(simulator), outcomes(gpu));
    let (differences, not_run) = (table::<4>(differences), table::<2>(not_run));
    let mut wrong = Vec::new();
    for (probe, here) in &simulator {
        let listed = differences.iter().any(|[name, ours, theirs, _]| {
            name == probe && ours == here && outcome_of(&gpu, probe) == Some(*theirs) && ours != theirs
        });
        match outcome_of(&gpu, probe) {
            Some(there) if there == *here || listed => {}
            Some(there) => wrong.push(format!("{probe}: {here}, and on the GPU: {there}")),
            None if not_run.iter().any(|[name, _]| name == probe) => {}
            None => wrong.push(format!("{probe} was not run on the GPU, and is not in probes-not-run.txt")),
        }
    }
    let removed = gpu.iter().filter(|(probe, _)| outcome_of(&simulator, probe).is_none());
    wrong.extend(removed.map(|(probe, _)| format!("{probe} was run on the GPU, but does not exist")));
    for [probe, ours, theirs, why] in differences {
        let holds = outcome_of(&simulator, probe) == Some(ours) && outcome_of(&gpu, probe) == Some(theirs);
        if !holds || ours == theirs || why.is_empty() {
            wrong
                .push(format!("gpu-differences.txt: {probe} does not exist, or does not differ in this way"));
        }
    }
    for [probe, why] in not_run {
        if outcome_of(&simulator, probe).is_none() || outcome_of(&gpu, probe).is_some() || why.is_empty() {
            wrong.push(format!("probes-not-run.txt: {probe} does not exist, or was run"));
        }
    }
    wrong
}

#[test]
fn checked_in_outcomes_match_gpu() {
    assert!(outcomes(GPU).len() >= 170, "the GPU's list");
    let wrong = wrong_with(EXPECTED, GPU, DIFFERENCES, NOT_RUN);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_kind_of_difference_is_reported() {
    let is_right =
        |simulator, gpu, differences, not_run| wrong_with(simulator, gpu, differences, not_run).is_empty();
    assert!(is_right("# a remark\na: 1\nb: x: 2\n", "b: x: 2\na: 1\n", "", ""));
    assert!(is_right("a: 1", "a: 2", "a | 1 | 2 | because", ""));
    assert!(is_right("a: 1\nb: 2", "a: 1", "", "b | chosen"));
    for (simulator, gpu, differences, not_run) in [
        ("a: 1", "a: 2", "", ""),
        ("a: 1", "", "", ""),
        ("", "a: 1", "", ""),
        // A difference that is not listed, one that is listed and does not exist, and one of an unknown probe.
        ("a: 1", "a: 3", "a | 1 | 2 | because", ""),
        ("a: 1", "a: 1", "a | 1 | 2 | because", ""),
        ("a: 1", "a: 1", "a | 1 | 1 | because", ""),
        ("a: 1", "a: 1", "b | 1 | 2 | because", ""),
        ("a: 1", "a: 1", "", "a | chosen"),
        ("a: 1", "a: 1", "", "b | chosen"),
        ("a: 1", "a: 2", "", "a | chosen"),
    ] {
        assert!(
            !is_right(simulator, gpu, differences, not_run),
            "{simulator}, {gpu}, {differences}, {not_run}"
        );
    }
}

#[test]
fn probes_have_checked_in_outcomes() {
    let installed = Installed::new();
    let mut command = installed.command(env!("CARGO_BIN_EXE_cuda-probes"), "devices=2");
    command.arg(installed.library());
    let (success, text) = output_of(command, Duration::from_secs(240));
    assert!(success, "{text}");
    let (expected, found) = (outcomes(EXPECTED), outcomes(&text));
    assert!(expected.len() >= 60, "the list of probes");
    let mut differ = Vec::new();
    for (name, outcome) in &expected {
        match found.iter().find(|(known, _)| known == name) {
            // A machine without the right to create namespaces has no outcome to compare.
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
fn probes_with_one_device_skip_peer_rules() {
    let installed = Installed::new();
    let mut command = installed.command(env!("CARGO_BIN_EXE_cuda-probes"), "devices=1");
    command.arg(installed.library()).args(["--only", "another_device"]);
    let (success, text) = output_of(command, Duration::from_secs(60));
    assert!(success && text.lines().count() >= 3, "{text}");
    assert!(text.lines().all(|line| line.ends_with(": skipped: one device")), "{text}");
}
