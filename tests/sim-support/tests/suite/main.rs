//! The tests of the simulators' common code and of the mock's profiles, as one executable.

mod hiding;
mod mock_profiles;
