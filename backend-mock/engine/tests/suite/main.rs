//! The tests of the simulated machine, as one executable.

mod config;
mod lifetime;
mod memory;
mod ordering;
mod streams;
mod support;
mod vmm;
