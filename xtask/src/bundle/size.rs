//! The size of a bundle.

use std::fmt::Write as _;

const MIB: u64 = 1024 * 1024;

/// Returns a table of names and sizes with their sum.
pub(super) fn table(sizes: &[(String, u64)]) -> String {
    let width = sizes.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut table = String::new();
    let total = ("sum".to_owned(), sum(sizes));
    for (name, bytes) in sizes.iter().chain([&total]) {
        let _ = writeln!(table, "  {name:width$}  {:>7.2} MiB", mib(*bytes));
    }
    table
}

fn sum(sizes: &[(String, u64)]) -> u64 {
    sizes.iter().map(|(_, bytes)| bytes).sum()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_ends_with_the_sum() {
        let table = table(&[("file-0".to_owned(), MIB), ("file-1".to_owned(), MIB / 2)]);
        assert_eq!(table, "  file-0     1.00 MiB\n  file-1     0.50 MiB\n  sum        1.50 MiB\n");
    }
}
