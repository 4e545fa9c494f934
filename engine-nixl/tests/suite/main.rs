//! The tests of the engine NIXL, as one executable.

mod nixl;
mod pull;
mod road;
mod two_hosts;
mod unavailable;
