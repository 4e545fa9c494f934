//! `cargo xtask features`: lints the library and the programs of each package without features, with each feature alone, and
//! with all features. Tests and examples are linted by CI's step for the workspace.
//!
//! cargo-hack can do the same with `--each-feature`, but CI would have to compile it first, which takes about a minute.

use anyhow::Result;
use serde_json::Value;

use crate::workspace::{cargo, metadata, packages, run as run_command};

pub(crate) fn run() -> Result<()> {
    for package in with_features(packages(&metadata(&["--no-deps"])?)?) {
        for set in sets(&package.features) {
            let mut command = cargo(["clippy", "--package", &package.name, "--no-default-features"]);
            if !set.is_empty() {
                command.args(["--features", &set]);
            }
            command.args(["--", "-D", "warnings"]);
            run_command(&mut command)?;
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq)]
struct Package {
    name: String,
    features: Vec<String>,
}

/// Returns the packages that have features besides `default`.
fn with_features(packages: &[Value]) -> Vec<Package> {
    let features = |package: &Value| -> Vec<String> {
        let table = package["features"].as_object();
        table.into_iter().flat_map(|table| table.keys()).filter(|name| *name != "default").cloned().collect()
    };
    packages
        .iter()
        .map(|package| Package {
            name: package["name"].as_str().unwrap_or_default().to_owned(),
            features: features(package),
        })
        .filter(|package| !package.features.is_empty())
        .collect()
}

/// Returns the sets to lint as values of `--features`: none, each alone, all.
fn sets(features: &[String]) -> Vec<String> {
    let mut sets = vec![String::new()];
    sets.extend_from_slice(features);
    if features.len() > 1 {
        sets.push(features.join(","));
    }
    sets
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn packages_with_only_default_are_skipped() {
        let packages = [
            json!({ "name": "facade", "features": { "cuda": ["dep:x"], "default": ["cuda"], "mock": [] } }),
            json!({ "name": "core", "features": {} }),
            json!({ "name": "tool", "features": { "default": [] } }),
        ];
        let facade = Package { name: "facade".into(), features: vec!["cuda".into(), "mock".into()] };
        assert_eq!(with_features(&packages), [facade]);
    }

    #[test]
    fn sets_contain_none_each_and_all() {
        assert_eq!(sets(&["cuda".into(), "mock".into()]), ["", "cuda", "mock", "cuda,mock"]);
        assert_eq!(sets(&["one".into()]), ["", "one"]);
    }
}
