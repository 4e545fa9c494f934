//! The tests of the program, as one executable: the modules are its commands.

mod ascend;
mod attach;
mod cuda;
mod doctor;
mod file;
mod hostile_input;
mod keep;
mod operations;
mod program;
mod remote;
mod support;
mod usage;
