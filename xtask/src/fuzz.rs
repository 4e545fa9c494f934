//! `cargo xtask fuzz`: runs the fuzz targets in `fuzz/`, each for an equal share of the time.
//!
//! It replaces cargo-fuzz, which requires a nightly toolchain: the coverage pass of LLVM is available in the stable compiler.
//! The address sanitizer is not, but all code that reads foreign bytes is safe Rust.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::{cargo, host, output, root, run as run_command, target_directory};

/// The flags of cargo-fuzz: counters at every edge, traced comparisons, debug assertions.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions";

/// Maximum length of an input in bytes. Longer descriptors and conversations do not reach new code.
const MAX_INPUT_BYTES: usize = 4096;

/// Timeout of one input in seconds.
const INPUT_SECONDS: u32 = 10;

/// Memory limit of a target in MiB, which detects allocations of an unchecked length.
const MEMORY_MIB: u32 = 1024;

/// Run the fuzz targets on a copy of their corpus; requires a C++ compiler (Debian: g++)
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Time for all targets together, in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Run only these targets
    targets: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    check_compiler()?;
    let fuzz = root().join("fuzz");
    let manifest = fuzz.join("Cargo.toml");
    let metadata =
        output(cargo(["metadata", "--format-version", "1", "--no-deps", "--manifest-path"]).arg(&manifest))?;
    let metadata: Value =
        serde_json::from_str(&metadata).context("the output of cargo metadata is not JSON")?;
    let targets = selected(targets(&metadata), &options.targets)?;
    let host = host()?;
    let build = target_directory().join("fuzz");
    // With --target, the flags do not apply to build scripts.
    run_command(
        cargo(["build", "--release", "--locked", "--bins", "--target", &host, "--manifest-path"])
            .arg(&manifest)
            .arg("--target-dir")
            .arg(&build)
            .env("RUSTFLAGS", FLAGS)
            .env_remove("CARGO_ENCODED_RUSTFLAGS"),
    )?;
    let seconds = (options.seconds / targets.len() as u32).max(1);
    for target in targets {
        let program = build.join(&host).join("release").join(&target);
        fuzz_one(&program, &fuzz.join("corpus").join(&target), &build.join("run").join(&target), seconds)
            .with_context(|| format!("cannot fuzz {target}"))?;
    }
    Ok(())
}

/// Runs one target in `directory`, on a copy of its corpus.
fn fuzz_one(program: &Path, seeds: &Path, directory: &Path, seconds: u32) -> Result<()> {
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    let corpus = directory.join("corpus");
    fs::create_dir_all(&corpus)?;
    let mut copied = 0;
    for seed in fs::read_dir(seeds).with_context(|| format!("cannot read {}", seeds.display()))? {
        let seed = seed?;
        fs::copy(seed.path(), corpus.join(seed.file_name()))?;
        copied += 1;
    }
    ensure!(copied > 0, "no seeds in {}", seeds.display());
    let log = directory.join("log");
    let mut command = Command::new(program);
    command
        .arg(&corpus)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={MAX_INPUT_BYTES}"))
        .arg(format!("-timeout={INPUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-artifact_prefix={}/", directory.display()))
        .arg("-print_final_stats=1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log)?);
    let status = command.status().with_context(|| format!("cannot start {}", program.display()))?;
    let log = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let name = program.file_name().unwrap_or_default().display();
    if !status.success() {
        // The log of libFuzzer contains the reason and the input as text, in Base64 and as a file.
        eprintln!("{log}");
        eprintln!(
            "to reproduce: {} FILE, where FILE contains the input (decode it from the log with base64 --decode)",
            program.display()
        );
        bail!("{name} failed ({status})");
    }
    let last =
        |label: &str| log.lines().rev().find_map(|line| line.split_once(label).map(|(_, rest)| rest.trim()));
    let word = |text: Option<&str>| text.and_then(|text| text.split(' ').next()).unwrap_or("?").to_owned();
    println!(
        "{name}: {} inputs in {seconds} s, {} a second, {} edges covered, from {copied} seeds",
        word(last("stat::number_of_executed_units:")),
        word(last("stat::average_exec_per_sec:")),
        word(last("cov: ")),
    );
    Ok(())
}

fn check_compiler() -> Result<()> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let found = Command::new(&compiler).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    ensure!(
        found.is_ok_and(|status| status.success()),
        "libFuzzer requires a C++ compiler, but {compiler:?} does not run; install one (Debian: g++), or set CXX"
    );
    Ok(())
}

/// Returns the programs of the fuzz package.
fn targets(metadata: &Value) -> Vec<String> {
    let all = metadata["packages"].as_array().into_iter().flatten();
    let all = all.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let programs =
        all.filter(|target| target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"bin".into())));
    programs.filter_map(|target| target["name"].as_str()).map(str::to_owned).collect()
}

/// Returns the named targets, or all targets if none is named.
fn selected(all: Vec<String>, named: &[String]) -> Result<Vec<String>> {
    if let Some(unknown) = named.iter().find(|name| !all.contains(name)) {
        bail!("target {unknown:?} not found; available targets: {}", all.join(", "));
    }
    ensure!(!all.is_empty(), "the fuzz package has no targets");
    Ok(if named.is_empty() { all } else { named.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn targets_are_programs_without_examples() {
        let target = |kind: &str, name: &str| json!({ "kind": [kind], "name": name });
        let targets_of_package = [target("bin", "one"), target("example", "seeds"), target("bin", "two")];
        let metadata = json!({ "packages": [{ "targets": targets_of_package }] });
        assert_eq!(targets(&metadata), ["one", "two"]);
    }

    #[test]
    fn unknown_target_is_an_error_that_lists_the_targets() {
        let all = || vec!["one".to_owned(), "two".to_owned()];
        assert_eq!(selected(all(), &[]).unwrap(), ["one", "two"]);
        assert_eq!(selected(all(), &["two".into()]).unwrap(), ["two"]);
        assert!(selected(all(), &["three".into()]).unwrap_err().to_string().contains("one, two"));
    }
}
