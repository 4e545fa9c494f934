//! `cargo xtask candle`: do we build beside candle?
//!
//! cudarc's ways to reach CUDA's libraries exclude each other, and Cargo joins the features that all crates of a
//! build ask for. `tests/candle-features` asks for those that candle asks for.

use anyhow::Result;

use crate::workspace::{cargo, run as run_command};

pub(crate) fn run() -> Result<()> {
    run_command(&mut cargo(["check", "--manifest-path", "tests/candle-features/Cargo.toml"]))
}
