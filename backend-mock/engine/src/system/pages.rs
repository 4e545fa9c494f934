//! Pages of memory.

/// Returns the size of a page in bytes.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// Rounds up to whole pages; `None` if that overflows.
pub(crate) fn whole_pages(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(page_size() as u64)
}
