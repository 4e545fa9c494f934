//! `cargo xtask candle`: checks that the library builds in one program with candle, and builds the example.
//!
//! cudarc's features for loading the CUDA libraries exclude each other, and Cargo unifies the features that all crates of a
//! build request. `tests/candle-features` requests those that candle requests.
//!
//! `examples/candle` depends on candle itself. Its kernels are compiled by nvcc, and its programs are linked with the CUDA
//! libraries, neither of which exists on a machine without a GPU. A stub of nvcc is sufficient for type checks
//! ([`stub_nvcc`]), and what needs no CUDA of candle is tested without it. For an executable program, `--build` downloads nvcc
//! ([`toolkit`]) and creates stub libraries for the linker ([`link`]).

mod link;
mod stub_nvcc;
mod toolkit;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::workspace::{cargo, executables, output, run as run_command, target_directory};

/// The manifest of the example with candle.
const EXAMPLE: &str = "examples/candle/Cargo.toml";

/// Check the build with candle's selection of cudarc features, and check and test the example with candle
#[derive(Args)]
pub(crate) struct Options {
    /// Also build the example and its tests for a machine with a GPU: with the toolkit in CUDA_HOME, otherwise with nvcc from
    /// PyPI (100 MiB); CUDA_COMPUTE_CAP selects the GPU, default: 90 (H100, H200)
    #[arg(long)]
    build: bool,
    /// Output directory; default: candle/programs in the target directory
    #[arg(long, value_name = "DIR", requires = "build")]
    out: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    run_command(&mut cargo(["check", "--manifest-path", "tests/candle-features/Cargo.toml"]))?;
    let directory = target_directory().join("candle");
    check(&directory)?;
    if options.build {
        build(&directory, options.out.as_deref())?;
    }
    Ok(())
}

/// Lints the example with empty kernels, and tests it on candle's CPU.
fn check(directory: &Path) -> Result<()> {
    let toolkit = stub_nvcc::toolkit(&directory.join("stub-nvcc"))?;
    let mut clippy = cargo(["clippy", "--manifest-path", EXAMPLE, "--all-targets", "--target-dir"]);
    clippy.arg(directory.join("check"));
    run_command(with_toolkit(clippy.args(["--", "-D", "warnings"]), &toolkit)?)?;
    let mut tests = cargo(["test", "--no-default-features", "--manifest-path", EXAMPLE, "--target-dir"]);
    run_command(tests.arg(directory.join("cpu")))
}

/// Builds the program and the tests in release mode, stripped.
fn build(directory: &Path, out: Option<&Path>) -> Result<()> {
    let toolkit = match env::var_os("CUDA_HOME") {
        Some(installed) => PathBuf::from(installed),
        None => {
            let toolkit = toolkit::download(directory)?;
            link::libraries(&cudarc_sources()?, &toolkit)?;
            toolkit
        }
    };
    let mut built = Vec::new();
    for arguments in [&["build"][..], &["test", "--no-run"]] {
        let mut command = cargo(arguments.iter().copied());
        command
            .args(["--release", "--manifest-path", EXAMPLE, "--message-format=json-render-diagnostics"])
            .arg("--target-dir")
            .arg(directory.join("build"))
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
        built.extend(programs(&output(with_toolkit(&mut command, &toolkit)?)?)?);
    }
    let out = out.map_or_else(|| directory.join("programs"), Path::to_owned);
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    for (name, executable) in built {
        let to = out.join(name);
        fs::copy(&executable, &to).with_context(|| format!("cannot write {}", to.display()))?;
        println!("{}", to.display());
    }
    println!(
        "the programs require libcublas, libcurand and libcudart of CUDA 13 in the search path of the linker (LD_LIBRARY_PATH)"
    );
    Ok(())
}

/// Makes the build scripts of candle and cudarc use this toolkit.
fn with_toolkit<'a>(command: &'a mut Command, toolkit: &Path) -> Result<&'a mut Command> {
    let programs = toolkit.join("bin");
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(std::iter::once(programs.clone()).chain(env::split_paths(&path)))
        .context("a directory in PATH has a colon in its name")?;
    let capability = env::var_os("CUDA_COMPUTE_CAP").unwrap_or_else(|| OsString::from("90"));
    Ok(command
        .env("PATH", path)
        .env("NVCC", programs.join("nvcc"))
        .env("CUDA_HOME", toolkit)
        .env("CUDA_COMPUTE_CAP", capability))
}

/// The directory of the cudarc that the example is built with.
fn cudarc_sources() -> Result<PathBuf> {
    let metadata = output(&mut cargo(["metadata", "--format-version", "1", "--manifest-path", EXAMPLE]))?;
    let metadata =
        serde_json::from_str(&metadata).context("cargo metadata printed something that is not JSON")?;
    let packages = crate::workspace::packages(&metadata)?;
    let cudarc = packages.iter().find(|package| package["name"] == "cudarc");
    let manifest = cudarc.and_then(|package| package["manifest_path"].as_str());
    let directory = manifest.and_then(|manifest| Path::new(manifest).parent());
    Ok(directory.context("the example does not depend on cudarc")?.join("src"))
}

/// Returns names and paths of the programs and integration tests in Cargo's messages; unit tests are skipped.
fn programs(messages: &str) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for (message, executable) in executables(messages)? {
        let is_test = message["target"]["kind"][0] == "test";
        if is_test || message["profile"]["test"] == false {
            let name = message["target"]["name"].as_str().unwrap_or_default();
            let name = if is_test { format!("device-ipc-candle-example--{name}") } else { name.to_owned() };
            found.push((name, executable));
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_integration_tests_are_collected() {
        let message = |kind: &str, name: &str, test: bool, executable: &str| {
            format!(
                r#"{{"target":{{"kind":["{kind}"],"name":"{name}"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let messages = [
            message("lib", "example", false, "null"),
            message("bin", "example", false, "\"/t/example\""),
            message("bin", "example", true, "\"/t/deps/example-1\""),
            message("test", "hand_over", true, "\"/t/deps/hand_over-2\""),
            message("bin", "example", false, "\"/t/example\""),
            "something else".to_owned(),
        ];
        let found = programs(&messages.join("\n")).unwrap();
        let found: Vec<_> =
            found.iter().map(|(name, path)| (name.as_str(), path.to_str().unwrap())).collect();
        assert_eq!(
            found,
            [("device-ipc-candle-example--hand_over", "/t/deps/hand_over-2"), ("example", "/t/example")]
        );
        assert!(programs("{\"target\":").is_err());
    }

    #[test]
    fn toolkit_precedes_path() {
        let mut command = Command::new("cargo");
        with_toolkit(&mut command, Path::new("/toolkit")).unwrap();
        let of = |name: &str| {
            let found = command.get_envs().find(|(key, _)| *key == name);
            found.and_then(|(_, value)| value).unwrap().to_str().unwrap().to_owned()
        };
        assert!(of("PATH").starts_with("/toolkit/bin:"));
        assert_eq!((of("NVCC"), of("CUDA_HOME")), ("/toolkit/bin/nvcc".into(), "/toolkit".into()));
    }
}
