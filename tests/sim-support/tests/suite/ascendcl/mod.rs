//! The simulated AscendCL.

mod c_programs;
mod events;
mod ipc_memory;
mod machine;
mod memory;
mod physical_memory;
mod start;
mod support;
mod table;
