//! `cargo xtask bundle`: collects programs and test executables for a machine that has devices and no Rust.
//!
//! The bundle does not depend on the checkout: the script `run.sh` passes the path of the program, and the executables
//! require only the C library.

mod artifact;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::workspace::{cargo, metadata, output, root, run as run_command, target_directory};
use artifact::Artifact;

/// The main program.
const PROGRAM: &str = "device-ipc";
/// Package and name of each program, the main program first; tests start some of them.
const PROGRAMS: [(&str, &str); 5] = [
    ("device-ipc-cli", PROGRAM),
    ("device-ipc-bench", "device-ipc-bench"),
    ("device-ipc-soak", "device-ipc-soak"),
    ("device-ipc-broker-tests", "broker-agent"),
    ("device-ipc-sim-cuda", "cuda-probes"),
];
/// The script that runs all executables in its directory.
const SCRIPT: &str = include_str!("run.sh");
/// The libraries of NIXL.
const ARCHIVE: &str = "nixl.zip";
/// The start of the second line of the script, which identifies a bundle.
const SCRIPT_MARK: &str = "# Runs a bundle of device-ipc";

/// Programs of a bundle that only copies over the network.
const REMOTE_PROGRAMS: [&str; 2] = [PROGRAM, "device-ipc-bench"];

/// Collect stripped programs and test executables, with a script that runs them on a machine without Rust
#[derive(Args)]
pub(crate) struct Options {
    /// Output directory; default: bundle in the target directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only what copies over the network, with NIXL for CUDA 13, in less than 64 MiB
    #[arg(long)]
    remote: bool,
}

/// Packages whose tests use a device. Tests of the others require cargo or run without a device.
const TESTS_OF: [&str; 4] = ["device-ipc", "device-ipc-broker-tests", "device-ipc-cli", "device-ipc-cuda"];
/// The package whose tests need NIXL.
const REMOTE_TESTS_OF: [&str; 1] = ["device-ipc-nixl"];

pub(crate) fn run(options: &Options) -> Result<()> {
    let packages = artifact::package_names(&metadata(&["--no-deps"])?)?;
    let out = options.out.clone().unwrap_or_else(|| target_directory().join("bundle"));

    let mut arguments = vec!["test", "--no-run"];
    let tests_of = if options.remote { &REMOTE_TESTS_OF[..] } else { &TESTS_OF };
    arguments.extend(tests_of.iter().flat_map(|package| ["--package", package]));
    // The script selects the themes of the tests that use a device.
    let tests = artifact::artifacts(&build(&arguments)?, &packages)?;
    // After the tests, because the build of the tests links the programs too and would overwrite them.
    let mut files: Vec<Artifact> = Vec::new();
    for (package, name) in
        PROGRAMS.iter().filter(|(_, name)| !options.remote || REMOTE_PROGRAMS.contains(name))
    {
        let messages = build(&["build", "--package", package, "--bin", name])?;
        files
            .extend(artifact::artifacts(&messages, &packages)?.into_iter().filter(|file| file.name == *name));
    }
    files.extend(tests.into_iter().filter(|file| file.name.contains("--")));
    prepare_directory(&out)?;
    for file in &files {
        let to = out.join(&file.name);
        fs::copy(&file.executable, &to)
            .with_context(|| format!("cannot copy {} to {}", file.executable.display(), to.display()))?;
    }
    if options.remote {
        run_command(Command::new(root().join(".ci/nixl")).arg("--archive").arg(out.join(ARCHIVE)))?;
    }
    let script = out.join("run.sh");
    fs::write(&script, SCRIPT).with_context(|| format!("cannot write {}", script.display()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    run_command(Command::new("du").args(["-ah", "--apparent-size"]).arg(&out))
}

/// Builds in release mode, stripped, and returns Cargo's messages as JSON lines.
fn build(args: &[&str]) -> Result<String> {
    output(
        cargo(args.iter().copied())
            .args(["--release", "--message-format=json-render-diagnostics"])
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .current_dir(root()),
    )
}

/// Creates the directory, or removes the executables of an older bundle from it. Fails for a directory with other contents.
fn prepare_directory(out: &Path) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let names = fs::read_dir(out)?.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    let is_bundle = fs::read_to_string(out.join("run.sh")).is_ok_and(|script| script.contains(SCRIPT_MARK));
    if !names.is_empty() && !is_bundle {
        bail!("{} is not empty and not a bundle; select another directory with --out", out.display());
    }
    for name in names {
        let name = name.to_string_lossy();
        if PROGRAMS.iter().any(|(_, program)| name == *program) || name.contains("--") || name == ARCHIVE {
            fs::remove_file(out.join(&*name))
                .with_context(|| format!("cannot remove {name} of the older bundle"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_contains_the_bundle_mark() {
        assert!(SCRIPT.lines().nth(1).unwrap().starts_with(SCRIPT_MARK));
    }
}
