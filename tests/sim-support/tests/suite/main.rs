//! The tests of the simulators' common code, of the simulated AscendCL, and of the mock's profiles, as one executable.

mod ascendcl;
mod hiding;
mod mock_profiles;
