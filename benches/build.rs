//! Passes the commit of the source to the program, for the heading of its report.

use std::process::Command;

/// The sources of the program; uncommitted changes in them mark the commit.
const SOURCES: [&str; 7] = [
    "src",
    "../cli/src",
    "../src",
    "../ipc-core/src",
    "../backend-ascend/src",
    "../backend-cuda/src",
    "../backend-mock",
];

fn main() {
    println!("cargo::rerun-if-env-changed=DEVICE_IPC_COMMIT");
    if std::env::var_os("DEVICE_IPC_COMMIT").is_some() {
        return;
    }
    // Git appends every change of the checked-out commit to this file.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
    }
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return };
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    println!("cargo::rustc-env=DEVICE_IPC_COMMIT={commit}{}", if changed { "+" } else { "" });
}

/// Returns the output of git, or `None` without git or a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
