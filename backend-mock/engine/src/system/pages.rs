//! Pages of memory.

/// Size of a page and of the header, in bytes.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// The lowest whole pages that hold `bytes`; `None` if that overflows.
pub(crate) fn whole_pages(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(page_size() as u64)
}
