//! Modules of the program `device-ipc` that the benchmark program `device-ipc-bench` uses too.

pub mod child;
pub mod output;
pub mod selection;
