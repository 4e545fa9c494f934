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
