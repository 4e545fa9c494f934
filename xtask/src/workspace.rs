//! The workspace, and commands that run in it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Returns the directory of the workspace's `Cargo.toml`.
pub(crate) fn root() -> PathBuf {
    // Set by `cargo run`; otherwise the directory from which the program was compiled.
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().expect("xtask is in a directory of the workspace").to_owned()
}

/// Returns the target directory of Cargo, which also contains downloaded files.
pub(crate) fn target_directory() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |set| root().join(set))
}

/// Returns a command for the Cargo that started this program, in the root of the workspace.
pub(crate) fn cargo<I, A>(args: I) -> Command
where
    I: IntoIterator<Item = A>,
    A: Into<OsString>,
{
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args.into_iter().map(Into::into));
    command
}

/// Prints a command and runs it with its output on the terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = command_line(command);
    eprintln!("+ {shown}");
    let start = Instant::now();
    let status = command.status().with_context(|| format!("cannot start: {shown}"))?;
    if !status.success() {
        bail!("command failed ({status}): {shown}");
    }
    eprintln!("  {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Prints a command, runs it and returns its standard output; its standard error goes to the terminal.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = command_line(command);
    eprintln!("+ {shown}");
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start: {shown}"))?;
    if !output.status.success() {
        bail!("command failed ({}): {shown}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("the output is not UTF-8: {shown}"))
}

/// Returns the output of `cargo metadata` with additional arguments.
pub(crate) fn metadata(args: &[&str]) -> Result<Value> {
    let text = output(cargo(["metadata", "--format-version", "1"]).args(args))?;
    serde_json::from_str(&text).context("the output of cargo metadata is not JSON")
}

/// Returns the packages in the output of `cargo metadata`.
pub(crate) fn packages(metadata: &Value) -> Result<&Vec<Value>> {
    metadata["packages"].as_array().context("the output of cargo metadata contains no packages")
}

fn command_line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
