//! The executables in Cargo's messages, and their names in the bundle.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::workspace::packages;

/// One executable of the bundle.
#[derive(Debug, PartialEq)]
pub(super) struct Artifact {
    pub(super) name: String,
    pub(super) executable: PathBuf,
}

/// Returns package names by package id.
pub(super) fn package_names(metadata: &Value) -> Result<BTreeMap<String, String>> {
    let pair =
        |package: &Value| Some((package["id"].as_str()?.to_owned(), package["name"].as_str()?.to_owned()));
    packages(metadata)?.iter().map(|package| pair(package).context("a package without id or name")).collect()
}

/// Returns the programs (`NAME`) and the integration tests (`PACKAGE--TARGET`) in Cargo's messages, sorted by name. Unit tests use
/// no device.
pub(super) fn artifacts(messages: &str, packages: &BTreeMap<String, String>) -> Result<Vec<Artifact>> {
    let mut artifacts = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value =
            serde_json::from_str(line).with_context(|| format!("not a message of cargo: {line}"))?;
        let Some(executable) = message["executable"].as_str().map(PathBuf::from) else { continue };
        let target = message["target"]["name"].as_str().unwrap_or_default();
        let is_integration_test = message["target"]["kind"][0] == "test";
        let name = match message["profile"]["test"] == true {
            false => target.to_owned(),
            true if is_integration_test => {
                let id = message["package_id"].as_str().unwrap_or_default();
                let package = packages.get(id).with_context(|| format!("package not found: {id}"))?;
                format!("{package}--{target}")
            }
            true => continue,
        };
        artifacts.push(Artifact { name, executable });
    }
    artifacts.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(artifacts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn packages() -> BTreeMap<String, String> {
        let metadata = json!({ "packages": [{ "id": "path+file:///w#cli@0.1.0", "name": "cli" }] });
        package_names(&metadata).unwrap()
    }

    fn message(kind: &str, target: &str, test: bool, executable: Option<&str>) -> String {
        json!({
            "reason": "compiler-artifact",
            "package_id": "path+file:///w#cli@0.1.0",
            "target": { "kind": [kind], "name": target },
            "profile": { "test": test },
            "executable": executable,
        })
        .to_string()
    }

    #[test]
    fn programs_and_integration_tests_are_named_and_unit_tests_are_left_out() {
        let messages = [
            message("lib", "cli", false, None),
            message("bin", "device-ipc", false, Some("/t/device-ipc")),
            message("bin", "device-ipc", true, Some("/t/deps/device_ipc-1")),
            message("test", "suite", true, Some("/t/deps/suite-2")),
            "a line of something else".to_owned(),
            json!({ "reason": "build-finished", "success": true }).to_string(),
        ]
        .join("\n");
        let artifacts = artifacts(&messages, &packages()).unwrap();
        let pairs: Vec<_> =
            artifacts.iter().map(|one| (one.name.as_str(), one.executable.to_str().unwrap())).collect();
        assert_eq!(pairs, [("cli--suite", "/t/deps/suite-2"), ("device-ipc", "/t/device-ipc")]);
    }

    #[test]
    fn unknown_package_and_malformed_message_are_errors() {
        assert!(artifacts(&message("test", "suite", true, Some("/1")), &BTreeMap::new()).is_err());
        assert!(artifacts("{\"reason\":", &packages()).is_err());
    }
}
