//! Chores of the workspace that plain Cargo commands cannot express; `cargo xtask --help` lists them.

mod abi;
mod bindgen;
mod bundle;
mod candle;
mod download;
mod features;
mod fuzz;
mod layers;
mod msrv;
mod nixl;
mod public_api;
mod python;
#[cfg(test)]
mod vendors;
mod verify_abi;
mod workspace;

use clap::Parser;

/// Chores of the device-ipc workspace
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Command {
    Bundle(bundle::Options),
    /// Lint each package that has features: without features, and with each feature alone
    Features,
    Candle(candle::Options),
    /// Check that imports in ipc-core run down its layers only
    Layers,
    /// Check that no dependency requires a newer Rust than `rust-version`
    Msrv,
    /// Test device-ipc-nixl with NIXL, downloaded from PyPI
    Nixl,
    Fuzz(fuzz::Options),
    PublicApi(public_api::Options),
    Python(python::Options),
    Bindgen(bindgen::Options),
    /// Compare the bindings of ACL with the vendor's headers of two CANN generations, downloaded from PyPI
    VerifyAbi,
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Bundle(options) => bundle::run(&options),
        Command::Features => features::run(),
        Command::Candle(options) => candle::run(&options),
        Command::Layers => layers::run(),
        Command::Msrv => msrv::run(),
        Command::Nixl => nixl::run(),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::PublicApi(options) => public_api::run(&options),
        Command::Python(options) => python::run(&options),
        Command::Bindgen(options) => bindgen::run(&options),
        Command::VerifyAbi => verify_abi::run(),
    }
}
