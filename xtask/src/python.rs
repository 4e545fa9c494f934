//! `cargo xtask python`: builds the Python package in a virtual environment below the target directory, and tests it.
//!
//! The package is built as `pip install ./python` builds it, but without optimization. The tests run on the mock, with NumPy and
//! with PyTorch, and so do the Python programs of `docs/seeds`.
//!
//! PyTorch is the wheel for CUDA, with stubs of the CUDA libraries (`python/tools/stub_cuda_libraries.py`). It is installed once,
//! with a time limit of the download: 530 MB, and 1.5 GB on disk. Where that fails, or with `--no-torch`, its tests are skipped.
//! So are the tests with Ray, which starts its own processes, where it cannot be installed, or with `--no-ray`: 79 MB, and 260 MB on
//! disk. The modules of vLLM with which its backend is tested are copied from the wheels of three releases, of which nothing else
//! is kept: 1.2 GB to download, once. Where that fails, or with `--no-vllm`, stand-ins with the same signatures remain.
//!
//! Everything is skipped, with the reason, where there is no suitable interpreter, or where pip cannot install what the tests
//! need, as on a machine without a network.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use clap::Args;

use crate::workspace::{root, run as run_command, target_directory};

const PIP: &[&str] = &["-m", "pip", "--disable-pip-version-check", "install", "--quiet"];

/// What the tests need beside the package.
const PACKAGES: &[&str] = &["maturin>=1.9.4,<2", "mypy", "numpy", "pytest", "pytest-xdist"];

/// PyTorch without the CUDA libraries, except for the runtime.
const TORCH: &[&str] = &["torch==2.11.0", "nvidia-cuda-runtime==13.0.96"];

/// The packages that PyTorch imports, and transformers, which needs PyTorch.
const TORCH_NEEDS: &[&str] = &[
    "expecttest",
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "setuptools<82",
    "sympy",
    "transformers==5.24.0",
    "typing-extensions",
];

/// The time limit of the download of PyTorch, in seconds. It takes 30 s with 18 MB/s.
const TORCH_SECONDS: &str = "180";

/// Ray, which has wheels for some versions of Python only.
const RAY: &str = "ray==2.60.0";

/// The time limit of the installation of Ray, in seconds. It takes 15 s with 18 MB/s.
const RAY_SECONDS: &str = "120";

/// Releases of vLLM: one for each family of signatures.
const VLLM: [&str; 3] = ["0.33.0", "0.28.0", "0.25.1"];

/// The time limit of the download of one release of vLLM, in seconds. It takes 30 s with 18 MB/s.
const VLLM_SECONDS: &str = "90";

/// A program that fails unless the interpreter can make the virtual environment.
const SUITABLE: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";

/// Whether the wheel is one for this version alone.
const IS_OLD: &str = "import sys; sys.exit(sys.version_info >= (3, 11))";

/// Build the Python package in a virtual environment and test it
#[derive(Args)]
pub(crate) struct Options {
    /// The interpreter, 3.10 or later
    #[arg(long, default_value = "python3")]
    python: String,
    /// Do not install PyTorch, whose tests are skipped
    #[arg(long)]
    no_torch: bool,
    /// Do not install Ray, whose tests are skipped
    #[arg(long)]
    no_ray: bool,
    /// Do not download vLLM, which is tested with stand-ins alone
    #[arg(long)]
    no_vllm: bool,
    /// Only install the packages that the tests need
    #[arg(long)]
    install_only: bool,
    /// Fill in the outputs of the Python programs in docs/seeds, instead of comparing them
    #[arg(long)]
    seeds: bool,
    /// Arguments of pytest, which runs four files of tests at a time; `-n 0` runs one, for `--pdb` and `-s`
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    // Another interpreter has another environment.
    let name = Path::new(&options.python).file_name().context("--python names no program")?;
    let environment = target_directory().join("python").join(name);
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
    if let Err(error) = run_command(python().args(PIP).args(PACKAGES)) {
        return skip("pip cannot install the packages; is the package index reachable?", &error);
    }
    if !options.no_torch {
        install(&python, "torch", TORCH, (TORCH_SECONDS, &["--no-deps"]), || {
            run_command(python().args(PIP).args(TORCH_NEEDS))?;
            run_command(python().arg("tools/stub_cuda_libraries.py"))
        })?;
    }
    if !options.no_ray && !options.no_torch {
        install(&python, "ray", &[RAY], (RAY_SECONDS, &[]), || Ok(()))?;
    }
    if !options.no_vllm && !options.no_torch {
        fetch_vllm(&interpreter);
    }
    if options.install_only {
        return Ok(());
    }
    // maturin finds the interpreter by VIRTUAL_ENV, and itself needs no activation.
    let mut maturin = python();
    maturin.args(["-m", "maturin", "develop", "--quiet"]);
    if Command::new(&interpreter).args(["-c", IS_OLD]).status()?.success() {
        maturin.args(["--no-default-features", "--features", "backends"]);
    }
    maturin.env("CARGO_TARGET_DIR", target_directory()).env("PATH", path_with(&environment.join("bin"))?);
    run_command(&mut maturin)?;
    // The tests of the allocation functions for PyTorch find the simulated CUDA driver in the target directory.
    run_command(Command::new(env!("CARGO")).args(["build", "--quiet", "--package", "device-ipc-sim-cuda"]))?;
    let mut pytest = python();
    pytest.args(["-m", "pytest", "-rs", "-n", "4", "--dist", "loadfile"]);
    // A test that ends its process would be run again, as often as four times for each process.
    pytest.args(["--max-worker-restart", "0", "tests"]).args(&options.arguments);
    pytest.env("CARGO_TARGET_DIR", target_directory());
    run_command(&mut pytest)?;
    // Without PyTorch, its classes have no types.
    let has_torch =
        python().args(["-c", "import torch"]).stderr(Stdio::null()).status().is_ok_and(|it| it.success());
    let without = ["--allow-subclassing-any", "--no-warn-unused-ignores"];
    let lenient = if has_torch { &[][..] } else { &without };
    for checked in [["-p", "device_ipc"].as_slice(), &["tests"], &["-p", "engines"]] {
        let mut mypy = python();
        mypy.args(["-m", "mypy", "--strict"]).args(lenient).args(checked);
        run_command(&mut mypy)?;
    }
    let mut stubtest = python();
    stubtest.args(["-m", "mypy.stubtest", "device_ipc._native"]);
    stubtest.args(["--allowlist", "stubtest-allowlist", "--ignore-unused-allowlist"]);
    run_command(&mut stubtest)?;
    let mut seeds = python();
    seeds.arg(root().join("docs/seeds/refresh.py")).args(["--machine", "python"]);
    if !options.seeds {
        seeds.arg("--check");
    }
    run_command(&mut seeds)
}

/// Installs a module in the environment, unless it can be imported. Reports why it cannot be installed, which is not a failure.
fn install(
    python: &impl Fn() -> Command,
    module: &str,
    packages: &[&str],
    (seconds, options): (&str, &[&str]),
    then: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let imports = |quiet: bool| {
        let mut import = python();
        import.args(["-c", &format!("import {module}")]);
        import.stderr(if quiet { Stdio::null() } else { Stdio::inherit() });
        run_command(&mut import)
    };
    if imports(true).is_ok() {
        return Ok(());
    }
    let installed = || -> Result<()> {
        let interpreter = python().get_program().to_owned();
        let wheels = target_directory().join("python/wheels");
        let mut download = Command::new("timeout");
        download.arg(seconds).arg(interpreter).args(["-m", "pip", "--quiet", "download"]).args(options);
        download.args(["--only-binary", ":all:", "--no-cache-dir", "--dest"]).arg(&wheels).args(packages);
        run_command(download.current_dir(root().join("python")))?;
        // An installation that was interrupted would leave half a package.
        let mut install = python();
        install.args(PIP).args(options).args(["--no-index", "--find-links"]).arg(&wheels).args(packages);
        let installed = run_command(&mut install);
        fs::remove_dir_all(&wheels).context("removing the downloaded wheels")?;
        installed?;
        then()
    };
    if let Err(error) = installed() {
        eprintln!(
            "the tests with {module} are skipped: it cannot be downloaded within {seconds} s, or not be installed\n  {error}"
        );
        return Ok(());
    }
    imports(false).with_context(|| format!("{module} was installed, but cannot be imported"))
}

/// Copies the modules of releases of vLLM, unless they are there. Reports which cannot be downloaded, which is not a failure.
fn fetch_vllm(interpreter: &Path) {
    for version in VLLM {
        let folder = root().join("python/target/vllm").join(version);
        if folder.is_dir() {
            continue;
        }
        let mut fetch = Command::new("timeout");
        fetch.arg(VLLM_SECONDS).arg(interpreter).args(["tools/fetch_vllm.py", version]);
        if let Err(error) = run_command(fetch.current_dir(root().join("python"))) {
            eprintln!(
                "the tests with vLLM's own modules are skipped for {version} and what follows it: it cannot be downloaded within \
                 {VLLM_SECONDS} s\n  {error}"
            );
            return;
        }
    }
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
