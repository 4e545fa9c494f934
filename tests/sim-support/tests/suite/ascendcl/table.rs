//! The table of rules names existing tests and sources, and contains every test.

use std::collections::BTreeSet;

const TABLE: &str = include_str!("../../../../../docs/internals/ascend-rules.md");

/// The files whose tests the table may name.
const FILES: &[(&str, &str)] = &[
    ("c_programs", include_str!("c_programs.rs")),
    ("events", include_str!("events.rs")),
    ("ipc_memory", include_str!("ipc_memory.rs")),
    ("machine", include_str!("machine.rs")),
    ("memory", include_str!("memory.rs")),
    ("physical_memory", include_str!("physical_memory.rs")),
    ("start", include_str!("start.rs")),
    ("src/node.rs", include_str!("../../../../sim-ascendcl/src/node.rs")),
    ("src/value.rs", include_str!("../../../../sim-ascendcl/src/value.rs")),
];

/// The files of the backend's tests that the table may name.
const BACKEND: &[(&str, &str)] = &[
    ("conformance::reserved", include_str!("../../../../conformance/src/cases/reserved/ranges.rs")),
    ("rules::cards", include_str!("../../../../../backend-ascend/tests/rules/cards.rs")),
    ("rules::contexts", include_str!("../../../../../backend-ascend/tests/rules/contexts.rs")),
    ("rules::devices", include_str!("../../../../../backend-ascend/tests/rules/devices.rs")),
    ("rules::events", include_str!("../../../../../backend-ascend/tests/rules/events.rs")),
    ("rules::exports", include_str!("../../../../../backend-ascend/tests/rules/exports.rs")),
    ("rules::keys", include_str!("../../../../../backend-ascend/tests/rules/keys.rs")),
    ("rules::library", include_str!("../../../../../backend-ascend/tests/rules/library.rs")),
    ("rules::lifetimes", include_str!("../../../../../backend-ascend/tests/rules/lifetimes.rs")),
    ("rules::lists", include_str!("../../../../../backend-ascend/tests/rules/lists.rs")),
    ("rules::shareable", include_str!("../../../../../backend-ascend/tests/rules/shareable.rs")),
    ("rules::timelines", include_str!("../../../../../backend-ascend/tests/rules/timelines.rs")),
    ("rules::unavailable", include_str!("../../../../../backend-ascend/tests/rules/unavailable.rs")),
    ("rules::visible_devices", include_str!("../../../../../backend-ascend/tests/rules/visible_devices.rs")),
];

/// The sources that the table may name as the implementation of a rule.
const SOURCES: &[&str] = &[
    "abi.rs",
    "block.rs",
    "call.rs",
    "cann.rs",
    "config.rs",
    "context.rs",
    "copy.rs",
    "device.rs",
    "event.rs",
    "host.rs",
    "install.rs",
    "ipc_event.rs",
    "ipc_memory.rs",
    "key.rs",
    "memory.rs",
    "node.rs",
    "notify.rs",
    "simulator.rs",
    "soc.rs",
    "status.rs",
    "stream.rs",
    "system.rs",
    "value.rs",
    "vmm.rs",
];

/// The list of all sources, so that the list above cannot name a missing one.
const MODULES: &str = include_str!("../../../../sim-ascendcl/src/lib.rs");

/// Returns the rows of rules, with five cells each.
fn rows() -> Vec<Vec<&'static str>> {
    let cells = |line: &'static str| line.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>();
    let is_row = |row: &Vec<&str>| row.len() == 5 && row[0] != "rule";
    TABLE.lines().filter(|line| line.starts_with("| ")).map(cells).filter(is_row).collect()
}

/// Returns the names of the tests in a file.
fn tests_of(text: &str) -> BTreeSet<&str> {
    let by_attribute = text.split("#[test]").skip(1).filter_map(|rest| rest.trim_start().strip_prefix("fn "));
    let named = by_attribute.filter_map(|rest| rest.split('(').next()).filter(|name| !name.contains('$'));
    let cases = text.split("\npub fn ").filter_map(|rest| rest.split_once("(context: &Context) -> Outcome"));
    let cases = cases.map(|(name, _)| name).filter(|name| !name.contains('('));
    named.chain(cases).collect()
}

/// Checks that a cell names a test of these files.
fn exists(cell: &str, files: &[(&str, &str)], rule: &str) {
    let name = cell.trim_matches('`');
    let (file, test) = name.rsplit_once("::").unwrap_or_else(|| panic!("no test in the row '{rule}'"));
    let found = files.iter().find(|(known, _)| *known == file);
    let (_, text) = found.unwrap_or_else(|| panic!("no file of tests is called {file}"));
    assert!(tests_of(text).contains(test), "there is no test {name}, which the rule '{rule}' names");
}

#[test]
fn rows_name_existing_tests() {
    let rows = rows();
    assert!(rows.len() > 70, "the table was read: {} rows", rows.len());
    for row in rows {
        exists(row[3], FILES, row[0]);
        if row[4] != "·" {
            exists(row[4], BACKEND, row[0]);
        }
        assert!(!row[1].is_empty(), "the rule '{}' says where it comes from", row[0]);
    }
}

#[test]
fn rows_name_existing_sources() {
    for row in rows() {
        let Some(place) = row[2].strip_prefix('`').and_then(|rest| rest.split('`').next()) else {
            assert!(
                row[2].starts_with("the engine") || row[2].starts_with("nothing to refuse"),
                "{}",
                row[2]
            );
            continue;
        };
        assert!(SOURCES.contains(&place), "there is no {place}, which the rule '{}' names", row[0]);
        let module = place.trim_end_matches(".rs");
        assert!(MODULES.contains(&format!("mod {module};")), "{place}");
    }
}

#[test]
fn table_contains_every_rule_test() {
    let named: BTreeSet<&str> = rows().iter().map(|row| row[3].trim_matches('`')).collect();
    // Tests of the simulator itself.
    let others = [
        "c_programs::concurrent_installs_fill_one_directory",
        "c_programs::library_links_by_both_names",
        "machine::the_chip_has_its_name",
        "machine::version_table_names_existing_symbols",
        "machine::fault_returns_any_status",
        "machine::invalid_description_is_reported",
        "ipc_memory::two_processes_share_writes",
        "events::time_between_events_is_not_negative",
    ];
    for (file, text) in FILES.iter().filter(|(file, _)| !file.starts_with("src/")) {
        for test in tests_of(text).into_iter().filter(|test| *test != "agent") {
            let name = format!("{file}::{test}");
            let known = named.contains(&*name) || others.contains(&&*name);
            assert!(known, "{name} stands in no row of docs/internals/ascend-rules.md");
        }
    }
}
