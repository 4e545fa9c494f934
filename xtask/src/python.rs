//! `cargo xtask python`: builds the Python package in a virtual environment below the target directory, and tests it.
//!
//! The package is built as `pip install ./python` builds it, but without optimization. The tests run on the mock. Tests with
//! PyTorch run if it is installed in the environment, or with `--torch DIR` from a directory; otherwise they are skipped.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::workspace::{root, run as run_command, target_directory};

/// What the tests need beside the package.
const PACKAGES: &[&str] = &["maturin>=1.9.4,<2", "mypy", "numpy", "pytest"];

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
    if !interpreter.exists() {
        run_command(Command::new(&options.python).args(["-m", "venv"]).arg(&environment))?;
    }
    let python = || {
        let mut command = Command::new(&interpreter);
        command.current_dir(root().join("python")).env("VIRTUAL_ENV", &environment).env_remove("PYTHONPATH");
        command
    };
    let pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"];
    run_command(python().args(pip).args(PACKAGES))?;
    // maturin finds the interpreter by VIRTUAL_ENV, and itself needs no activation.
    let mut maturin = python();
    maturin.args(["-m", "maturin", "develop", "--quiet"]);
    maturin.env("CARGO_TARGET_DIR", target_directory()).env("PATH", path_with(&environment.join("bin"))?);
    run_command(&mut maturin)?;
    let mut pytest = python();
    pytest.args(["-m", "pytest", "-rs", "tests"]).args(&options.arguments);
    if let Some(torch) = &options.torch {
        pytest.env("PYTHONPATH", torch);
    }
    run_command(&mut pytest)?;
    run_command(python().args(["-m", "mypy", "--strict", "-p", "device_ipc"]))?;
    run_command(python().args(["-m", "mypy", "--strict", "tests"]))?;
    run_command(python().args(["-m", "mypy.stubtest", "device_ipc._native"]))
}

/// Returns the search path for programs with this directory first.
fn path_with(directory: &Path) -> Result<std::ffi::OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(std::iter::once(directory.to_owned()).chain(env::split_paths(&path)))
        .context("a directory in PATH has a colon in its name")
}
