//! `cargo xtask features`: lints each package with features without them, and with each feature alone. CI's step for the
//! workspace lints them with all features together, and tests and examples.
//!
//! cargo-hack can do the same with `--each-feature`, but CI would have to compile it first, and it lints one package at a time.
//! Here, one command lints all packages with a feature of the same name, because they forward it to each other: the libraries
//! below them are then checked once. A package must not enable other features of another of these packages.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::Value;

use crate::workspace::{cargo, metadata, packages, run as run_command};

pub(crate) fn run() -> Result<()> {
    for (feature, packages) in sets(packages(&metadata(&["--no-deps"])?)?) {
        let mut command = cargo(["clippy", "--no-default-features"]);
        for package in packages {
            command.args(["--package", package]);
            if !feature.is_empty() {
                command.args(["--features", &format!("{package}/{feature}")]);
            }
        }
        run_command(command.args(["--", "-D", "warnings"]))?;
    }
    Ok(())
}

/// Returns the packages to lint together with one feature, or with none (""), by feature.
fn sets(packages: &[Value]) -> BTreeMap<&str, Vec<&str>> {
    let mut sets = BTreeMap::<_, Vec<_>>::new();
    for package in packages {
        let table = package["features"].as_object().into_iter().flatten();
        let mut features: Vec<_> =
            table.map(|(name, _)| name.as_str()).filter(|name| *name != "default").collect();
        if !features.is_empty() {
            features.push("");
        }
        for feature in features {
            sets.entry(feature).or_default().push(package["name"].as_str().unwrap_or_default());
        }
    }
    sets
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn packages_with_the_same_feature_are_linted_together() {
        let packages = [
            json!({ "name": "core", "features": { "half": [] } }),
            json!({ "name": "facade", "features": { "default": ["mock"], "half": ["core/half"], "mock": [] } }),
            json!({ "name": "tool", "features": { "default": [] } }),
            json!({ "name": "plain", "features": {} }),
        ];
        let expected =
            [("", vec!["core", "facade"]), ("half", vec!["core", "facade"]), ("mock", vec!["facade"])];
        assert_eq!(sets(&packages).into_iter().collect::<Vec<_>>(), expected);
    }
}
