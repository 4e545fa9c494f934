//! How large a bundle is, and how large it may be.

use std::fmt::Write as _;

use anyhow::{Result, bail};

const MIB: u64 = 1024 * 1024;
/// What is carried to other machines stays small.
const LIMIT: u64 = 80 * MIB;

/// Name and size of each file, and the sum.
pub(super) fn table(sizes: &[(String, u64)]) -> String {
    let width = sizes.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut table = String::new();
    let total = ("sum".to_owned(), sum(sizes));
    for (name, bytes) in sizes.iter().chain([&total]) {
        let _ = writeln!(table, "  {name:width$}  {:>7.2} MiB", mib(*bytes));
    }
    table
}

/// # Errors
///
/// Fails where the files are larger than [`LIMIT`] together.
pub(super) fn check(sizes: &[(String, u64)]) -> Result<()> {
    let sum = sum(sizes);
    if sum > LIMIT {
        bail!("the bundle has {:.2} MiB, more than the {} that it may have", mib(sum), LIMIT / MIB);
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
    fn the_limit_itself_is_allowed_and_a_byte_more_is_not() {
        assert!(check(&sizes(&[LIMIT - 5, 5])).is_ok());
        assert!(check(&sizes(&[LIMIT - 5, 6])).unwrap_err().to_string().contains("80"));
    }

    #[test]
    fn the_table_ends_with_the_sum() {
        let table = table(&sizes(&[MIB, MIB / 2]));
        assert_eq!(table, "  file-0     1.00 MiB\n  file-1     0.50 MiB\n  sum        1.50 MiB\n");
    }
}
