//! The workspace that the chores work on, and the Cargo that runs them.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The folder with the workspace's `Cargo.toml`.
pub(crate) fn root() -> PathBuf {
    // Set by `cargo run`; where the program was compiled, for those who start it by hand.
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().expect("xtask lies in a folder of the workspace").to_owned()
}

/// Where Cargo builds, and where what is fetched is kept.
pub(crate) fn target_directory() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |set| root().join(set))
}

/// The Cargo that started this program, in the workspace's root.
pub(crate) fn cargo<I, A>(args: I) -> Command
where
    I: IntoIterator<Item = A>,
    A: Into<OsString>,
{
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args.into_iter().map(Into::into));
    command
}

/// Runs a command with its output on the terminal, after saying what it is.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    eprintln!("+ {shown}");
    let start = Instant::now();
    let status = command.status().with_context(|| format!("cannot start: {shown}"))?;
    if !status.success() {
        bail!("failed ({status}): {shown}");
    }
    eprintln!("  {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Runs a command and gives what it printed; its messages for people stay on the terminal.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    eprintln!("+ {shown}");
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start: {shown}"))?;
    if !output.status.success() {
        bail!("failed ({}): {shown}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("not UTF-8: the output of {shown}"))
}

/// What `cargo metadata` says, with further arguments.
pub(crate) fn metadata(args: &[&str]) -> Result<Value> {
    let text = output(cargo(["metadata", "--format-version", "1"]).args(args))?;
    serde_json::from_str(&text).context("cargo metadata printed something that is not JSON")
}

/// The packages in the answer of `cargo metadata`.
pub(crate) fn packages(metadata: &Value) -> Result<&Vec<Value>> {
    metadata["packages"].as_array().context("cargo metadata names no packages")
}

fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
