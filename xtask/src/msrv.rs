//! `cargo xtask msrv`: checks that no dependency requires a newer Rust than `rust-version`.
//!
//! Cargo prefers versions that are compatible with `rust-version`, but selects a newer one without an error if no version is.
//! The workspace's use of newer APIs is checked by clippy's `incompatible_msrv`.
//!
//! cargo-msrv compiles with the older toolchain, which rustup has to download; this check reads metadata only.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{host, metadata, packages};

pub(crate) fn run() -> Result<()> {
    let metadata = metadata(&["--filter-platform", &host()?])?;
    let packages = packages(&metadata)?;
    let supported = supported(packages)?;
    let newer = newer(packages, supported);
    if !newer.is_empty() {
        let (major, minor) = supported;
        bail!(
            "the workspace supports Rust {major}.{minor}, but these dependencies require a newer version: {}; use older \
             versions of them, or raise rust-version and record it in CHANGELOG.md",
            newer.join(", ")
        );
    }
    println!("{} packages, all compatible with Rust {}.{}", packages.len(), supported.0, supported.1);
    Ok(())
}

/// Returns the lowest `rust-version` of the packages of the workspace.
fn supported(packages: &[Value]) -> Result<(u32, u32)> {
    let own = packages.iter().filter(|package| package["source"].is_null());
    own.filter_map(rust_version).min().context("no package of the workspace has a rust-version")
}

fn newer(packages: &[Value], supported: (u32, u32)) -> Vec<String> {
    let newer =
        packages.iter().filter(|package| rust_version(package).is_some_and(|version| version > supported));
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
    fn dependencies_with_newer_rust_version_are_listed() {
        let packages = [
            json!({ "name": "ours", "source": null, "rust_version": "1.88" }),
            json!({ "name": "same", "source": "registry", "rust_version": "1.88.1" }),
            json!({ "name": "old", "source": "registry", "rust_version": "1.9" }),
            json!({ "name": "silent", "source": "registry", "rust_version": null }),
            json!({ "name": "new", "source": "registry", "rust_version": "1.90" }),
        ];
        let supported = supported(&packages).unwrap();
        assert_eq!(supported, (1, 88));
        assert_eq!(newer(&packages, supported), ["new (1.90)"]);
    }

    #[test]
    fn missing_rust_version_is_an_error() {
        assert!(supported(&[json!({ "name": "ours", "source": null, "rust_version": null })]).is_err());
    }
}
