//! Chores of the workspace that plain Cargo commands cannot say: `cargo xtask --help` lists them.

mod bundle;
mod candle;
mod features;
mod fuzz;
mod msrv;
mod workspace;

use clap::Parser;

/// Chores of the device-ipc workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Command {
    Bundle(bundle::Options),
    /// Lint every package that has features with none of them, with each alone, and with all.
    Features,
    /// Check that we build beside candle's choice of cudarc features.
    Candle,
    /// Check that no dependency asks for a newer Rust than we promise.
    Msrv,
    Fuzz(fuzz::Options),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Bundle(options) => bundle::run(&options),
        Command::Features => features::run(),
        Command::Candle => candle::run(),
        Command::Msrv => msrv::run(),
        Command::Fuzz(options) => fuzz::run(&options),
    }
}
