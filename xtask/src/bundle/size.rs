//! The size of a bundle and its limit.

use std::fmt::Write as _;

use anyhow::{Result, bail};

const MIB: u64 = 1024 * 1024;
/// Maximum size of a bundle in bytes, as it is copied to other machines.
const LIMIT: u64 = 80 * MIB;

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

/// Checks the size of the bundle.
///
/// # Errors
///
/// Fails if the sum of the sizes exceeds [`LIMIT`].
pub(super) fn check(sizes: &[(String, u64)]) -> Result<()> {
    let sum = sum(sizes);
    if sum > LIMIT {
        bail!("the bundle has {:.2} MiB, more than the limit of {} MiB", mib(sum), LIMIT / MIB);
    }
    Ok(())
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

    fn sizes(bytes: &[u64]) -> Vec<(String, u64)> {
        bytes.iter().enumerate().map(|(index, bytes)| (format!("file-{index}"), *bytes)).collect()
    }

    #[test]
    fn size_above_the_limit_is_an_error() {
        assert!(check(&sizes(&[LIMIT - 5, 5])).is_ok());
        assert!(check(&sizes(&[LIMIT - 5, 6])).unwrap_err().to_string().contains("80"));
    }

    #[test]
    fn table_ends_with_the_sum() {
        let table = table(&sizes(&[MIB, MIB / 2]));
        assert_eq!(table, "  file-0     1.00 MiB\n  file-1     0.50 MiB\n  sum        1.50 MiB\n");
    }
}
