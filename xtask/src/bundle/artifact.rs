//! The executables in Cargo's messages, and their names in the bundle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{executables, packages};

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

/// Returns the test executables in Cargo's messages, sorted by name.
pub(super) fn tests(messages: &str, packages: &BTreeMap<String, String>) -> Result<Vec<Artifact>> {
    let mut tests = Vec::new();
    for (message, executable) in executables(messages)? {
        if message["profile"]["test"] != true {
            continue;
        }
        let id = message["package_id"].as_str().unwrap_or_default();
        let package = packages
            .get(id)
            .with_context(|| format!("package not found in the output of cargo metadata: {id}"))?;
        tests.push(Artifact { name: test_name(package, &message["target"]), executable });
    }
    tests.sort_by(|a, b| a.name.cmp(&b.name));
    let names: BTreeSet<_> = tests.iter().map(|test| &test.name).collect();
    if names.len() != tests.len() {
        bail!("two test executables have the same name; rename one of the targets: {tests:?}");
    }
    Ok(tests)
}

/// Returns the program `name` from Cargo's messages.
pub(super) fn program(messages: &str, name: &str) -> Result<Artifact> {
    executables(messages)?
        .into_iter()
        .find(|(message, _)| message["target"]["name"] == name && message["profile"]["test"] == false)
        .map(|(_, executable)| Artifact { name: name.to_owned(), executable })
        .with_context(|| format!("program {name} not found in the messages of cargo"))
}

/// Returns the name of a test, `package--target`; the target of unit tests is `unit` for a library and `NAME-unit` for a
/// program.
fn test_name(package: &str, target: &Value) -> String {
    let name = target["name"].as_str().unwrap_or_default();
    let kinds = target["kind"].as_array().map(Vec::as_slice).unwrap_or_default();
    if kinds.iter().any(|kind| kind == "test") {
        format!("{package}--{name}")
    } else if kinds.iter().any(|kind| kind == "bin" || kind == "example" || kind == "bench") {
        format!("{package}--{name}-unit")
    } else {
        format!("{package}--unit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn packages() -> BTreeMap<String, String> {
        let metadata = json!({ "packages": [
            { "id": "path+file:///w/backend-cuda#device-ipc-cuda@0.1.0", "name": "device-ipc-cuda" },
            { "id": "path+file:///w/cli#device-ipc-cli@0.1.0", "name": "device-ipc-cli" },
        ]});
        package_names(&metadata).unwrap()
    }

    fn message(package: &str, kind: &str, target: &str, test: bool, executable: Option<&str>) -> String {
        let id = packages().into_iter().find(|(_, name)| name == package).unwrap().0;
        json!({
            "reason": "compiler-artifact",
            "package_id": id,
            "target": { "kind": [kind], "name": target },
            "profile": { "test": test },
            "executable": executable,
        })
        .to_string()
    }

    fn messages() -> String {
        [
            message("device-ipc-cuda", "lib", "device_ipc_cuda", false, None),
            message("device-ipc-cli", "bin", "device-ipc", false, Some("/t/release/device-ipc")),
            message("device-ipc-cli", "bin", "device-ipc", true, Some("/t/release/deps/device_ipc-1")),
            message("device-ipc-cuda", "test", "conformance", true, Some("/t/release/deps/conformance-2")),
            message(
                "device-ipc-cuda",
                "lib",
                "device_ipc_cuda",
                true,
                Some("/t/release/deps/device_ipc_cuda-3"),
            ),
            "a line of something else".to_owned(),
            json!({ "reason": "build-finished", "success": true }).to_string(),
        ]
        .join("\n")
    }

    #[test]
    fn tests_are_named_by_package_and_target() {
        let tests = tests(&messages(), &packages()).unwrap();
        let pairs: Vec<_> =
            tests.iter().map(|test| (test.name.as_str(), test.executable.to_str().unwrap())).collect();
        assert_eq!(
            pairs,
            [
                ("device-ipc-cli--device-ipc-unit", "/t/release/deps/device_ipc-1"),
                ("device-ipc-cuda--conformance", "/t/release/deps/conformance-2"),
                ("device-ipc-cuda--unit", "/t/release/deps/device_ipc_cuda-3"),
            ]
        );
    }

    #[test]
    fn program_is_distinguished_from_its_unit_tests() {
        let program = program(&messages(), "device-ipc").unwrap();
        assert_eq!(program.executable, PathBuf::from("/t/release/device-ipc"));
    }

    #[test]
    fn missing_program_is_an_error() {
        assert!(program(&messages(), "other").unwrap_err().to_string().contains("other"));
    }

    #[test]
    fn duplicate_name_is_an_error() {
        let once = message("device-ipc-cli", "test", "a", true, Some("/1"));
        let twice = [once.as_str(), once.as_str()].join("\n");
        assert!(tests(&twice, &packages()).unwrap_err().to_string().contains("device-ipc-cli--a"));
    }

    #[test]
    fn unknown_package_is_an_error() {
        assert!(tests(&messages(), &BTreeMap::new()).is_err());
    }

    #[test]
    fn malformed_message_is_an_error() {
        assert!(tests("{\"reason\":", &packages()).is_err());
    }
}
