//! The simulated AscendCL.

mod c_programs;
mod ipc_memory;
mod machine;
mod memory;
mod sharing;
mod start;
mod support;
mod table;
