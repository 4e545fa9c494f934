//! `cargo xtask mutants`: runs cargo-mutants on `ipc-core` and prints which share of the mutants the tests detect.
//!
//! `.cargo/mutants.toml` configures what is mutated and which tests run. See `docs/internals/mutants.md`.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{output, root, target_directory};

/// Exit codes of cargo-mutants for undetected mutants and for timeouts, which are results, not failures.
const MISSED: i32 = 2;
const TIMED_OUT: i32 = 3;

/// Mutate ipc-core and print which share of the mutants the tests detect; requires cargo-mutants
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Mutate only these files; paths or globs
    #[arg(long, value_name = "FILE")]
    file: Vec<String>,
    /// Mutate only lines that differ from this revision
    #[arg(long, value_name = "REV", conflicts_with = "sample")]
    diff: Option<String>,
    /// Test a sample of about N mutants, evenly distributed
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Run only the unit tests of device-ipc-core, which is faster and detects fewer mutants
    #[arg(long)]
    unit: bool,
    /// Mutate this working tree instead of a copy, re-using target/; do not edit files meanwhile
    #[arg(long)]
    in_place: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = program()?;
    let mut selection: Vec<String> =
        options.file.iter().flat_map(|file| ["--file".into(), file.clone()]).collect();
    let directory = target_directory().join("mutants");
    fs::create_dir_all(&directory)?;
    if let Some(revision) = &options.diff {
        let diff = output(Command::new("git").current_dir(root()).args(["diff", revision]))?;
        if diff.is_empty() {
            bail!("no lines differ from {revision}");
        }
        let file = directory.join("changes.diff");
        fs::write(&file, diff)?;
        selection.extend(["--in-diff".into(), file.display().to_string()]);
    }
    if let Some(sample) = options.sample {
        let listed = output(mutants(&program).args(["--list", "--json"]).args(&selection))?;
        let listed: Value = serde_json::from_str(&listed).context("the list of mutants is not JSON")?;
        let total = listed.as_array().map_or(0, Vec::len);
        let shards = shards(total, sample)?;
        selection.extend([
            "--sharding".into(),
            "round-robin".into(),
            "--shard".into(),
            format!("0/{shards}"),
        ]);
    }
    let mut command = mutants(&program);
    command.args(&selection).arg("--output").arg(&directory);
    if options.in_place {
        command.arg("--in-place");
    }
    if options.unit {
        command.args(["--test-package", "device-ipc-core", "--", "--lib"]);
    }
    match command.status().with_context(|| format!("cannot start {}", program.display()))?.code() {
        Some(0 | MISSED | TIMED_OUT) => {}
        other => bail!("cargo-mutants failed with exit code {other:?}; its messages are above"),
    }
    let results = directory.join("mutants.out").join("outcomes.json");
    let outcomes =
        fs::read_to_string(&results).with_context(|| format!("cannot read {}", results.display()))?;
    let score = Score::of(&serde_json::from_str(&outcomes).context("the outcomes are not JSON")?)?;
    println!("{score}");
    println!("details: {}", directory.join("mutants.out").display());
    Ok(())
}

/// Returns the program: the one in `target/tools`, otherwise the one in `PATH`.
fn program() -> Result<PathBuf> {
    let own = target_directory().join("tools/bin/cargo-mutants");
    if own.exists() {
        return Ok(own);
    }
    let installed = Command::new("cargo-mutants")
        .args(["mutants", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if installed {
        return Ok("cargo-mutants".into());
    }
    bail!(
        "cargo-mutants is not installed; install it with `cargo install cargo-mutants --locked`, or for this workspace only \
         with `cargo install cargo-mutants --locked --root target/tools`"
    )
}

fn mutants(program: &PathBuf) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).args(["mutants", "--package", "device-ipc-core"]);
    command
}

/// Returns the number of shards such that one shard has about the size of the sample.
fn shards(total: usize, sample: usize) -> Result<usize> {
    if total == 0 || sample == 0 {
        bail!("invalid sample: {sample} of {total} mutants");
    }
    Ok((total / sample).max(1))
}

/// The results of all mutants.
#[derive(Debug, PartialEq, Eq)]
struct Score {
    caught: u64,
    missed: u64,
    timed_out: u64,
    unviable: u64,
}

impl Score {
    fn of(outcomes: &Value) -> Result<Self> {
        let count =
            |name: &str| outcomes[name].as_u64().with_context(|| format!("the outcomes contain no {name:?}"));
        let (caught, missed) = (count("caught")?, count("missed")?);
        Ok(Self { caught, missed, timed_out: count("timeout")?, unviable: count("unviable")? })
    }
}

impl fmt::Display for Score {
    /// A mutant that times out counts as detected; one that does not compile is not counted.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { caught, missed, timed_out, unviable } = self;
        let detected = caught + timed_out;
        let tested = detected + missed;
        let percent = if tested == 0 { 0.0 } else { 100.0 * detected as f64 / tested as f64 };
        write!(
            f,
            "{detected} of {tested} mutants were detected ({percent:.1} %), {timed_out} of them by a timeout; {missed} were \
             missed, and {unviable} did not compile"
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sample_decides_the_number_of_shards() {
        assert_eq!(shards(4080, 40).unwrap(), 102);
        assert_eq!(shards(10, 40).unwrap(), 1);
        assert_eq!(shards(41, 40).unwrap(), 1);
        assert!(shards(0, 40).is_err() && shards(10, 0).is_err());
    }

    #[test]
    fn score_counts_timeouts_and_skips_unviable_mutants() {
        let outcomes = json!({ "caught": 26, "missed": 3, "timeout": 1, "unviable": 5, "total_mutants": 35 });
        let score = Score::of(&outcomes).unwrap();
        assert_eq!(score, Score { caught: 26, missed: 3, timed_out: 1, unviable: 5 });
        assert!(
            score.to_string().starts_with("27 of 30 mutants were detected (90.0 %), 1 of them"),
            "{score}"
        );
        assert!(Score::of(&json!({ "caught": 1 })).is_err());
    }
}
