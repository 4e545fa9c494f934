//! docs/spec/security.md names a test for each statement; a name that no longer exists is an error.

use std::fs;
use std::path::{Path, PathBuf};

/// The file of a test, as the page names it.
fn file_of(name: &str) -> PathBuf {
    let broker = Path::new(env!("CARGO_MANIFEST_DIR"));
    if ["cli/", "ipc-core/", "tcp/", "tests/"].iter().any(|folder| name.starts_with(folder)) {
        return broker.join("../..").join(name);
    }
    broker.join("tests/suite").join(name)
}

#[test]
fn security_page_names_tests_that_exist() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/spec/security.md");
    let page = fs::read_to_string(path).expect("the page is in the checkout");
    let mut checked = 0;
    for name in page.split('`').filter(|code| code.contains(".rs")) {
        let (file, test) = name.split_once("::").unwrap_or((name, ""));
        let source = fs::read_to_string(file_of(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(test.is_empty() || source.contains(&format!("fn {test}(")), "{file} has no test {test}");
        checked += 1;
    }
    assert!(checked > 50, "the page names only {checked} tests");
}

/// Programs with elevated privileges ignore all variables, so one file reads them.
#[test]
fn environment_is_read_in_one_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders: Vec<PathBuf> = [
        "src",
        "ipc-core/src",
        "tcp/src",
        "cli/src",
        "python/src",
        "engine-nixl/src",
        "backend-ascend/src",
        "backend-cuda/src",
        "backend-mock/src",
        "backend-mock/engine/src",
    ]
    .map(|folder| root.join(folder))
    .into();
    let mut readers = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = fs::read_to_string(&path).expect("a source file");
                let reads = ["env::var", "env::temp_dir", "env::home_dir", "getenv("];
                if reads.iter().any(|read| source.contains(read)) {
                    readers.push(path.strip_prefix(&root).expect("below the root").to_owned());
                }
            }
        }
    }
    assert_eq!(readers, [Path::new("ipc-core/src/os/environment.rs")]);
}
