//! `cargo xtask msrv`: no dependency asks for a newer Rust than the workspace promises.
//!
//! Cargo prefers versions that fit `rust-version`, and takes a newer one without an error where none does. Our own
//! use of newer APIs is clippy's `incompatible_msrv`.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{metadata, output, packages, root};

pub(crate) fn run() -> Result<()> {
    let rustc = output(Command::new("rustc").arg("-vV").current_dir(root()))?;
    let host =
        rustc.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc -vV names no host")?;
    let metadata = metadata(&["--filter-platform", host])?;
    let packages = packages(&metadata)?;
    let promised = promised(packages)?;
    let newer = newer(packages, promised);
    if !newer.is_empty() {
        let (major, minor) = promised;
        bail!(
            "the workspace promises Rust {major}.{minor}, and these ask for more: {}; take older versions of them, \
             or raise rust-version and say so in CHANGELOG.md",
            newer.join(", ")
        );
    }
    println!("{} packages, all content with Rust {}.{}", packages.len(), promised.0, promised.1);
    Ok(())
}

/// The lowest `rust-version` of the packages that lie in the workspace.
fn promised(packages: &[Value]) -> Result<(u32, u32)> {
    let own = packages.iter().filter(|package| package["source"].is_null());
    own.filter_map(rust_version).min().context("no package of the workspace states a rust-version")
}

fn newer(packages: &[Value], promised: (u32, u32)) -> Vec<String> {
    let newer =
        packages.iter().filter(|package| rust_version(package).is_some_and(|version| version > promised));
    newer.map(|package| format!("{} ({})", text(&package["name"]), text(&package["rust_version"]))).collect()
}

fn rust_version(package: &Value) -> Option<(u32, u32)> {
    let mut numbers = package["rust_version"].as_str()?.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next().flatten().unwrap_or(0)))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dependencies_that_ask_for_a_newer_rust_are_named() {
        let packages = [
            json!({ "name": "ours", "source": null, "rust_version": "1.88" }),
            json!({ "name": "same", "source": "registry", "rust_version": "1.88.1" }),
            json!({ "name": "old", "source": "registry", "rust_version": "1.9" }),
            json!({ "name": "silent", "source": "registry", "rust_version": null }),
            json!({ "name": "new", "source": "registry", "rust_version": "1.90" }),
        ];
        let promised = promised(&packages).unwrap();
        assert_eq!(promised, (1, 88));
        assert_eq!(newer(&packages, promised), ["new (1.90)"]);
    }

    #[test]
    fn a_workspace_without_a_promise_is_an_error() {
        assert!(promised(&[json!({ "name": "ours", "source": null, "rust_version": null })]).is_err());
    }
}
