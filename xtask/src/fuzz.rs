//! `cargo xtask fuzz`: runs the fuzz targets in `fuzz/`, each for its share of the time.
//!
//! It does what cargo-fuzz does, with the toolchain that is there: coverage is a pass of LLVM that the stable compiler
//! has too. There is no address sanitizer, which stable lacks; what reads foreign bytes here is safe Rust.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::{cargo, output, root, run as run_command, target_directory};

/// As cargo-fuzz builds: counters at every edge, comparisons shown to the fuzzer, checks on.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions";

/// The longest input in bytes. Descriptors and scripts of conversations that say something new are short.
const MAX_INPUT_BYTES: usize = 4096;

/// How many seconds one input may take.
const INPUT_SECONDS: u32 = 10;

/// How much memory a target may take, so that a length that lies is found.
const MEMORY_MIB: u32 = 1024;

/// Run the fuzz targets on a copy of their corpus. Needs a C++ compiler (Debian: g++).
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long, in all targets together.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Run these targets only.
    targets: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    check_compiler()?;
    let fuzz = root().join("fuzz");
    let manifest = fuzz.join("Cargo.toml");
    let metadata =
        output(cargo(["metadata", "--format-version", "1", "--no-deps", "--manifest-path"]).arg(&manifest))?;
    let metadata: Value =
        serde_json::from_str(&metadata).context("cargo metadata printed something that is not JSON")?;
    let targets = wanted(targets(&metadata), &options.targets)?;
    let host = host()?;
    let build = target_directory().join("fuzz");
    // With --target the flags are for the targets alone and not for build scripts, which nobody fuzzes.
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
            .with_context(|| format!("fuzzing {target}"))?;
    }
    Ok(())
}

/// Runs one target in `folder`, on a copy of its corpus.
fn fuzz_one(program: &Path, seeds: &Path, folder: &Path, seconds: u32) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let corpus = folder.join("corpus");
    fs::create_dir_all(&corpus)?;
    let mut copied = 0;
    for seed in fs::read_dir(seeds).with_context(|| format!("reading {}", seeds.display()))? {
        let seed = seed?;
        fs::copy(seed.path(), corpus.join(seed.file_name()))?;
        copied += 1;
    }
    ensure!(copied > 0, "there are no seeds in {}", seeds.display());
    let log = folder.join("log");
    let mut command = Command::new(program);
    command
        .arg(&corpus)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={MAX_INPUT_BYTES}"))
        .arg(format!("-timeout={INPUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-artifact_prefix={}/", folder.display()))
        .arg("-print_final_stats=1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log)?);
    let status = command.status().with_context(|| format!("starting {}", program.display()))?;
    let said = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let name = program.file_name().unwrap_or_default().display();
    if !status.success() {
        // libFuzzer says what went wrong, and shows the input as text, in Base64 and as a file.
        eprintln!("{said}");
        eprintln!(
            "again: {} FILE, with the input's file (base64 --decode makes one from a log)",
            program.display()
        );
        bail!("{name} failed ({status})");
    }
    let last =
        |what: &str| said.lines().rev().find_map(|line| line.split_once(what).map(|(_, rest)| rest.trim()));
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
        "libFuzzer is built by a C++ compiler, and {compiler:?} does not run; install one (Debian: g++), or set CXX"
    );
    Ok(())
}

/// The programs of the fuzz package.
fn targets(metadata: &Value) -> Vec<String> {
    let all = metadata["packages"].as_array().into_iter().flatten();
    let all = all.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let programs =
        all.filter(|target| target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"bin".into())));
    programs.filter_map(|target| target["name"].as_str()).map(str::to_owned).collect()
}

/// All of them where none is named.
fn wanted(all: Vec<String>, named: &[String]) -> Result<Vec<String>> {
    if let Some(unknown) = named.iter().find(|name| !all.contains(name)) {
        bail!("there is no target {unknown:?}; there are: {}", all.join(", "));
    }
    ensure!(!all.is_empty(), "the fuzz package has no target");
    Ok(if named.is_empty() { all } else { named.to_vec() })
}

fn host() -> Result<String> {
    let said = output(Command::new("rustc").arg("-vV").current_dir(root()))?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn targets_are_the_programs_and_no_examples() {
        let target = |kind: &str, name: &str| json!({ "kind": [kind], "name": name });
        let targets_of_package = [target("bin", "one"), target("example", "seeds"), target("bin", "two")];
        let metadata = json!({ "packages": [{ "targets": targets_of_package }] });
        assert_eq!(targets(&metadata), ["one", "two"]);
    }

    #[test]
    fn a_target_that_does_not_exist_is_an_error_that_names_those_that_do() {
        let all = || vec!["one".to_owned(), "two".to_owned()];
        assert_eq!(wanted(all(), &[]).unwrap(), ["one", "two"]);
        assert_eq!(wanted(all(), &["two".into()]).unwrap(), ["two"]);
        assert!(wanted(all(), &["three".into()]).unwrap_err().to_string().contains("one, two"));
    }
}
