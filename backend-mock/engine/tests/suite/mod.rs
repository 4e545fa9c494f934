//! The tests of the simulated machine by its public interface, in the executable of the unit tests.

mod config;
mod lifetime;
mod memory;
mod ordering;
mod streams;
mod support;
mod vmm;
