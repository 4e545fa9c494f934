//! `cargo xtask candle`: do we build beside candle, and does the example with candle?
//!
//! cudarc's ways to reach CUDA's libraries exclude each other, and Cargo joins the features that all crates of a
//! build ask for. `tests/candle-features` asks for those that candle asks for.
//!
//! `examples/candle` has candle itself. Its kernels are compiled by nvcc, and its programs are linked with CUDA's
//! libraries, neither of which a machine without a GPU has. To see whether the types fit, a stand-in for nvcc is enough
//! ([`stand_in`]); to run it somewhere, `--build` fetches nvcc ([`toolkit`]) and makes libraries to link with ([`link`]).

mod link;
mod stand_in;
mod toolkit;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::workspace::{cargo, output, run as run_command, target_directory};

/// The manifest of the example with candle.
const EXAMPLE: &str = "examples/candle/Cargo.toml";

/// Check that we build beside candle's choice of cudarc features, and the example with candle.
#[derive(Args)]
pub(crate) struct Options {
    /// Build the example with candle and its tests as well, for a machine with a GPU. Takes the toolkit in CUDA_HOME, else
    /// fetches nvcc from PyPI (100 MiB); CUDA_COMPUTE_CAP says for which GPU, 90 (H100, H200) if not set.
    #[arg(long)]
    build: bool,
    /// Where to put what was built; `candle/programs` in Cargo's target folder if not given.
    #[arg(long, value_name = "DIR", requires = "build")]
    out: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    run_command(&mut cargo(["check", "--manifest-path", "tests/candle-features/Cargo.toml"]))?;
    let folder = target_directory().join("candle");
    check(&folder)?;
    if options.build {
        build(&folder, options.out.as_deref())?;
    }
    Ok(())
}

/// Lints the example, with kernels that are empty.
fn check(folder: &Path) -> Result<()> {
    let toolkit = stand_in::toolkit(&folder.join("stand-in"))?;
    let mut clippy = cargo(["clippy", "--manifest-path", EXAMPLE, "--all-targets", "--target-dir"]);
    clippy.arg(folder.join("check"));
    run_command(with_toolkit(clippy.args(["--", "-D", "warnings"]), &toolkit)?)
}

/// Builds the program and the tests for release, stripped.
fn build(folder: &Path, out: Option<&Path>) -> Result<()> {
    let toolkit = match env::var_os("CUDA_HOME") {
        Some(installed) => PathBuf::from(installed),
        None => {
            let toolkit = toolkit::fetched(folder)?;
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
            .arg(folder.join("build"))
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
        built.extend(executables(&output(with_toolkit(&mut command, &toolkit)?)?)?);
    }
    let out = out.map_or_else(|| folder.join("programs"), Path::to_owned);
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    for (name, executable) in built {
        let to = out.join(name);
        fs::copy(&executable, &to).with_context(|| format!("cannot write {}", to.display()))?;
        println!("{}", to.display());
    }
    println!(
        "they need libcublas, libcurand and libcudart of CUDA 13 where the dynamic linker looks (LD_LIBRARY_PATH)"
    );
    Ok(())
}

/// Has the build scripts of candle's kernels and of cudarc find this toolkit.
fn with_toolkit<'a>(command: &'a mut Command, toolkit: &Path) -> Result<&'a mut Command> {
    let programs = toolkit.join("bin");
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(std::iter::once(programs.clone()).chain(env::split_paths(&path)))
        .context("a folder in PATH has a colon in its name")?;
    let capability = env::var_os("CUDA_COMPUTE_CAP").unwrap_or_else(|| OsString::from("90"));
    Ok(command
        .env("PATH", path)
        .env("NVCC", programs.join("nvcc"))
        .env("CUDA_HOME", toolkit)
        .env("CUDA_COMPUTE_CAP", capability))
}

/// The folder of the cudarc that the example is built with.
fn cudarc_sources() -> Result<PathBuf> {
    let metadata = output(&mut cargo(["metadata", "--format-version", "1", "--manifest-path", EXAMPLE]))?;
    let metadata =
        serde_json::from_str(&metadata).context("cargo metadata printed something that is not JSON")?;
    let packages = crate::workspace::packages(&metadata)?;
    let cudarc = packages.iter().find(|package| package["name"] == "cudarc");
    let manifest = cudarc.and_then(|package| package["manifest_path"].as_str());
    let folder = manifest.and_then(|manifest| Path::new(manifest).parent());
    Ok(folder.context("the example does not depend on cudarc")?.join("src"))
}

/// Names and paths of the programs in Cargo's messages; unit tests, of which there are none, are left out.
fn executables(messages: &str) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: serde_json::Value =
            serde_json::from_str(line).with_context(|| format!("not a message of cargo's: {line}"))?;
        let is_test = message["target"]["kind"][0] == "test";
        if let (Some(executable), true) =
            (message["executable"].as_str(), is_test || message["profile"]["test"] == false)
        {
            let name = message["target"]["name"].as_str().unwrap_or_default();
            let name = if is_test { format!("device-ipc-candle-example--{name}") } else { name.to_owned() };
            found.push((name, PathBuf::from(executable)));
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
    fn programs_and_integration_tests_are_taken_and_unit_tests_are_not() {
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
        let found = executables(&messages.join("\n")).unwrap();
        let found: Vec<_> =
            found.iter().map(|(name, path)| (name.as_str(), path.to_str().unwrap())).collect();
        assert_eq!(
            found,
            [("device-ipc-candle-example--hand_over", "/t/deps/hand_over-2"), ("example", "/t/example")]
        );
        assert!(executables("{\"target\":").is_err());
    }

    #[test]
    fn the_toolkit_comes_first_in_the_path() {
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
