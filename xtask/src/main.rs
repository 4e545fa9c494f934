//! Chores of the workspace that plain Cargo commands cannot express; `cargo xtask --help` lists them.

mod bindgen;
mod bundle;
mod features;
mod layers;
mod public_api;
mod python;
mod workspace;

use clap::Parser;

/// Chores of the device-ipc workspace
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Command {
    Bindgen(bindgen::Options),
    Bundle(bundle::Options),
    /// Lint each package that has features: without features, and with each feature alone
    Features,
    /// Check that imports in ipc-core run down its layers only
    Layers,
    PublicApi(public_api::Options),
    Python(python::Options),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Bindgen(options) => bindgen::run(&options),
        Command::Bundle(options) => bundle::run(&options),
        Command::Features => features::run(),
        Command::Layers => layers::run(),
        Command::PublicApi(options) => public_api::run(&options),
        Command::Python(options) => python::run(&options),
    }
}
