//! The tests of the backend by its public interface, in the executable of the unit tests.

mod rings;
mod test_kernels;
