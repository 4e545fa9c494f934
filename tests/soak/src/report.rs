//! The table: one line for each process of a row, before → after.

use std::time::Duration;

use crate::sizes::Sizes;

/// The head of the table, in Markdown.
pub(crate) const HEADER: &str = "\
| row | process | rounds | µs a round | resident KiB | heap B a round | descriptors | mappings | threads | device KiB | result |
|---|---|---:|---:|---|---:|---|---|---|---|---|";

/// One process of a row.
pub(crate) fn line(
    (row, process): (&str, &str),
    (rounds, time): (u64, Duration),
    (before, after): (&Sizes, &Sizes),
    grown: &[String],
) -> String {
    let change = |name: &str| match (before.get(name), after.get(name)) {
        (before, after) if before == after => format!("{before}"),
        (before, after) => format!("{before} → {after}"),
    };
    let heap = (after.get("heap_bytes") - before.get("heap_bytes")) as f64 / rounds as f64;
    let result = if grown.is_empty() { "flat".to_owned() } else { grown.join("; ") };
    format!(
        "| {row} | {process} | {rounds} | {:.1} | {} | {heap:.2} | {} | {} | {} | {} | {result} |",
        time.as_secs_f64() * 1e6 / rounds as f64,
        change("resident_kib"),
        change("descriptors"),
        change("mappings"),
        change("threads"),
        change("device_kib"),
    )
}
