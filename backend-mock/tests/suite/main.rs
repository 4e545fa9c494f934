//! The tests of the mock beside the conformance suite, as one executable.

mod rings;
mod test_kernels;
