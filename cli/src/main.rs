//! The program `device-ipc`: what this machine can share, the proof that it does, and who shares what.

mod child;
mod choose;
mod demo;
mod devices;
mod output;
mod ps;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Share accelerator memory between processes.
#[derive(Parser)]
#[command(name = "device-ipc", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List every backend with its devices, or why it cannot be used, and which devices reach each other.
    Devices(devices::Arguments),
    /// Hand a tensor to a second process, which changes it in place, and prove by its bytes that no copy was made.
    Demo(demo::Arguments),
    /// List every export on this machine that this user may see, and the processes that hold it.
    Ps(ps::Arguments),
    /// The second process of `demo`.
    #[command(hide = true)]
    DemoReceiver(demo::receiver::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Ps(arguments) => ps::run(&arguments),
        Command::DemoReceiver(arguments) => demo::receiver::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
