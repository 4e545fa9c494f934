//! `cargo xtask python`: builds the Python package in a virtual environment below the target directory, and tests it.
//!
//! The package is built as `pip install ./python` builds it, but without optimization. The tests run on the mock. Tests with
//! PyTorch run if it is installed in the environment, or with `--torch DIR` from a directory; otherwise they are skipped.
//!
//! Everything is skipped, with the reason, where there is no suitable interpreter, or where pip cannot install what the tests
//! need, as on a machine without a network.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::workspace::{root, run as run_command, target_directory};

/// What the tests need beside the package.
const PACKAGES: &[&str] = &["maturin>=1.9.4,<2", "mypy", "numpy", "pytest"];

/// A program that fails unless the interpreter can make the virtual environment.
const SUITABLE: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";

/// Build the Python package in a virtual environment and test it
#[derive(Args)]
pub(crate) struct Options {
    /// The interpreter, 3.10 or later
    #[arg(long, default_value = "python3")]
    python: String,
    /// A directory with PyTorch, as `pip install --target DIR torch` makes it
    #[arg(long, value_name = "DIR")]
    torch: Option<PathBuf>,
    /// Arguments of pytest
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let environment = target_directory().join("python");
    let interpreter = environment.join("bin/python");
    if let Err(error) = run_command(Command::new(&options.python).args(["-c", SUITABLE])) {
        return skip(
            "no interpreter of version 3.10 or later with the module venv (Debian: python3-venv)",
            &error,
        );
    }
    if !interpreter.exists() {
        run_command(Command::new(&options.python).args(["-m", "venv"]).arg(&environment))?;
    }
    let python = || {
        let mut command = Command::new(&interpreter);
        command.current_dir(root().join("python")).env("VIRTUAL_ENV", &environment).env_remove("PYTHONPATH");
        command
    };
    let pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"];
    if let Err(error) = run_command(python().args(pip).args(PACKAGES)) {
        return skip("pip cannot install the packages; is the package index reachable?", &error);
    }
    // maturin finds the interpreter by VIRTUAL_ENV, and itself needs no activation.
    let mut maturin = python();
    maturin.args(["-m", "maturin", "develop", "--quiet"]);
    maturin.env("CARGO_TARGET_DIR", target_directory()).env("PATH", path_with(&environment.join("bin"))?);
    run_command(&mut maturin)?;
    // The tests of the allocation functions for PyTorch find the simulated CUDA driver in the target directory.
    run_command(Command::new(env!("CARGO")).args(["build", "--quiet", "--package", "device-ipc-sim-cuda"]))?;
    let mut pytest = python();
    pytest.args(["-m", "pytest", "-rs", "tests"]).args(&options.arguments);
    pytest.env("CARGO_TARGET_DIR", target_directory());
    if let Some(torch) = &options.torch {
        pytest.env("PYTHONPATH", torch);
    }
    run_command(&mut pytest)?;
    run_command(python().args(["-m", "mypy", "--strict", "-p", "device_ipc"]))?;
    run_command(python().args(["-m", "mypy", "--strict", "tests"]))?;
    run_command(python().args(["-m", "mypy.stubtest", "device_ipc._native"]))
}

/// Reports that nothing was tested, which is not a failure.
#[expect(clippy::unnecessary_wraps, reason = "the result of the command")]
fn skip(reason: &str, error: &anyhow::Error) -> Result<()> {
    eprintln!("skipped: {reason}\n  {error}");
    Ok(())
}

/// Returns the search path for programs with this directory first.
fn path_with(directory: &Path) -> Result<std::ffi::OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(std::iter::once(directory.to_owned()).chain(env::split_paths(&path)))
        .context("a directory in PATH has a colon in its name")
}
