//! What Cargo says that it has built, and what the bundle calls it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::packages;

/// One executable of the bundle.
#[derive(Debug, PartialEq)]
pub(super) struct Artifact {
    pub(super) name: String,
    pub(super) executable: PathBuf,
}

/// The names of the packages by their ids, which Cargo's messages use.
pub(super) fn package_names(metadata: &Value) -> Result<BTreeMap<String, String>> {
    let pair =
        |package: &Value| Some((package["id"].as_str()?.to_owned(), package["name"].as_str()?.to_owned()));
    packages(metadata)?.iter().map(|package| pair(package).context("a package without id or name")).collect()
}

/// The test executables among Cargo's messages, by name.
pub(super) fn tests(messages: &str, packages: &BTreeMap<String, String>) -> Result<Vec<Artifact>> {
    let mut tests = Vec::new();
    for (message, executable) in executables(messages)? {
        if message["profile"]["test"] != true {
            continue;
        }
        let id = message["package_id"].as_str().unwrap_or_default();
        let package =
            packages.get(id).with_context(|| format!("cargo speaks of a package it has not named: {id}"))?;
        tests.push(Artifact { name: test_name(package, &message["target"]), executable });
    }
    tests.sort_by(|a, b| a.name.cmp(&b.name));
    let names: BTreeSet<_> = tests.iter().map(|test| &test.name).collect();
    if names.len() != tests.len() {
        bail!("two test executables have the same name: rename one of the targets in {tests:?}");
    }
    Ok(tests)
}

/// The program `name` among Cargo's messages.
pub(super) fn program(messages: &str, name: &str) -> Result<Artifact> {
    executables(messages)?
        .into_iter()
        .find(|(message, _)| message["target"]["name"] == name && message["profile"]["test"] == false)
        .map(|(_, executable)| Artifact { name: name.to_owned(), executable })
        .with_context(|| format!("cargo built no program {name}"))
}

/// The messages that tell of an executable.
fn executables(messages: &str) -> Result<Vec<(Value, PathBuf)>> {
    let mut found = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value =
            serde_json::from_str(line).with_context(|| format!("not a message of cargo's: {line}"))?;
        if let Some(executable) = message["executable"].as_str() {
            let executable = PathBuf::from(executable);
            found.push((message, executable));
        }
    }
    Ok(found)
}

/// `package--target`: an integration test has its own name, the unit tests of a library are `unit`, and those of
/// a program are called after it.
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
    fn test_executables_are_found_and_named_after_package_and_target() {
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
    fn the_program_is_not_taken_for_its_unit_tests() {
        let program = program(&messages(), "device-ipc").unwrap();
        assert_eq!(program.executable, PathBuf::from("/t/release/device-ipc"));
    }

    #[test]
    fn a_program_that_was_not_built_is_an_error() {
        assert!(program(&messages(), "other").unwrap_err().to_string().contains("other"));
    }

    #[test]
    fn two_executables_of_one_name_are_an_error() {
        let once = message("device-ipc-cli", "test", "a", true, Some("/1"));
        let twice = [once.as_str(), once.as_str()].join("\n");
        assert!(tests(&twice, &packages()).unwrap_err().to_string().contains("device-ipc-cli--a"));
    }

    #[test]
    fn an_unknown_package_is_an_error() {
        assert!(tests(&messages(), &BTreeMap::new()).is_err());
    }

    #[test]
    fn a_broken_message_is_an_error() {
        assert!(tests("{\"reason\":", &packages()).is_err());
    }
}
