//! `cargo xtask mutants`: changes `ipc-core` in one place at a time, and counts the changes that no test notices.
//!
//! cargo-mutants does the work; `.cargo/mutants.toml` says what is mutated and which tests run. See `docs/internals/mutants.md`.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{output, root, target_directory};

/// cargo-mutants ends so where tests did not notice a mutant, or ran out of time with one: results, not failures.
const MISSED: i32 = 2;
const TIMED_OUT: i32 = 3;

/// Mutate ipc-core and print which share of the mutants the tests notice. Needs cargo-mutants.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Mutate these files only; paths or globs.
    #[arg(long, value_name = "FILE")]
    file: Vec<String>,
    /// Mutate only lines that differ from this revision.
    #[arg(long, value_name = "REV", conflicts_with = "sample")]
    diff: Option<String>,
    /// Take about this many of the mutants, spread evenly.
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Run only the unit tests of device-ipc-core: faster, and they notice fewer mutants than all tests do.
    #[arg(long)]
    unit: bool,
    /// Mutate this tree instead of a copy of it, with what target/ has built. Do not edit meanwhile.
    #[arg(long)]
    in_place: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = program()?;
    let mut selection: Vec<String> =
        options.file.iter().flat_map(|file| ["--file".into(), file.clone()]).collect();
    let folder = target_directory().join("mutants");
    fs::create_dir_all(&folder)?;
    if let Some(revision) = &options.diff {
        let diff = output(Command::new("git").current_dir(root()).args(["diff", revision]))?;
        if diff.is_empty() {
            bail!("nothing differs from {revision}");
        }
        let file = folder.join("changes.diff");
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
    command.args(&selection).arg("--output").arg(&folder);
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
    let results = folder.join("mutants.out").join("outcomes.json");
    let outcomes = fs::read_to_string(&results).with_context(|| format!("reading {}", results.display()))?;
    let score = Score::of(&serde_json::from_str(&outcomes).context("the outcomes are not JSON")?)?;
    println!("{score}");
    println!("details: {}", folder.join("mutants.out").display());
    Ok(())
}

/// The program: the one in `target/tools`, else what `cargo mutants` finds.
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
        "cargo-mutants is not installed; install it with `cargo install cargo-mutants --locked`, or for this workspace alone \
         with `cargo install cargo-mutants --locked --root target/tools`"
    )
}

fn mutants(program: &PathBuf) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).args(["mutants", "--package", "device-ipc-core"]);
    command
}

/// How many parts the mutants are divided into, so that one part is about the sample.
fn shards(total: usize, sample: usize) -> Result<usize> {
    if total == 0 || sample == 0 {
        bail!("{sample} of {total} mutants are no sample");
    }
    Ok((total / sample).max(1))
}

/// What became of the mutants.
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
            |name: &str| outcomes[name].as_u64().with_context(|| format!("the outcomes name no {name:?}"));
        let (caught, missed) = (count("caught")?, count("missed")?);
        Ok(Self { caught, missed, timed_out: count("timeout")?, unviable: count("unviable")? })
    }
}

impl fmt::Display for Score {
    /// A mutant with which the tests never end has been noticed; one that does not compile says nothing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { caught, missed, timed_out, unviable } = self;
        let noticed = caught + timed_out;
        let tested = noticed + missed;
        let percent = if tested == 0 { 0.0 } else { 100.0 * noticed as f64 / tested as f64 };
        write!(
            f,
            "{noticed} of {tested} mutants were noticed ({percent:.1} %), {timed_out} of them by a timeout; {missed} were \
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
    fn score_counts_timeouts_as_noticed_and_not_what_does_not_compile() {
        let outcomes = json!({ "caught": 26, "missed": 3, "timeout": 1, "unviable": 5, "total_mutants": 35 });
        let score = Score::of(&outcomes).unwrap();
        assert_eq!(score, Score { caught: 26, missed: 3, timed_out: 1, unviable: 5 });
        assert!(
            score.to_string().starts_with("27 of 30 mutants were noticed (90.0 %), 1 of them"),
            "{score}"
        );
        assert!(Score::of(&json!({ "caught": 1 })).is_err());
    }
}
