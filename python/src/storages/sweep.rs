//! When to look for entries of a table that have ended: at twice as many as were left, so that a look costs each new entry little.

/// The least number of entries at which a table is looked through.
const LEAST: usize = 128;

/// The number of entries at which a table is looked through next.
#[derive(Default)]
pub(super) struct Sweep(usize);

impl Sweep {
    /// Returns whether to look for ended entries of a table with this many.
    pub(super) fn is_due(&self, entries: usize) -> bool {
        entries >= self.0.max(LEAST)
    }

    /// Notes that this many entries are left.
    pub(super) const fn swept(&mut self, left: usize) {
        self.0 = 2 * left;
    }
}
