//! The program `device-ipc`: what this machine can share, the proof that it does, and who shares what.

mod attach;
mod demo;
mod devices;
mod doctor;
mod exporter;
mod memory;
mod progress;
mod ps;
mod recv;
mod road;
mod send;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use device_ipc::printable;
use device_ipc_cli::output::OutputClosed;

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
    /// Share a tensor with receivers in other terminals: by a file, by TCP with a shared key, or by text.
    Send(Box<send::Arguments>),
    /// Open a tensor that `send` shares, on any device, and print it, add to it or write it out.
    Recv(Box<recv::Arguments>),
    /// Do one thing to a tensor that another process shares: describe, read, fill or add.
    Attach(Box<attach::Arguments>),
    /// Look for what on this machine would stop sharing, say what to change, and try it with a second process.
    Doctor(doctor::Arguments),
    /// The second process of `doctor`.
    #[command(hide = true)]
    DoctorLibrary(doctor::libraries::Arguments),
    /// The second process of `doctor` that looks at Ascend cards.
    #[command(hide = true)]
    DoctorAscend(doctor::ascend_card::Arguments),
    /// The second process of `demo`.
    #[command(hide = true)]
    DemoReceiver(demo::receiver::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Ps(arguments) => ps::run(&arguments),
        Command::Send(arguments) => send::run(&arguments),
        Command::Recv(arguments) => recv::run(&arguments),
        Command::Attach(arguments) => attach::run(&arguments),
        Command::Doctor(arguments) => return ended(doctor::run(&arguments)),
        Command::DoctorLibrary(arguments) => doctor::libraries::run(&arguments),
        Command::DoctorAscend(arguments) => doctor::ascend_card::run(&arguments),
        Command::DemoReceiver(arguments) => demo::receiver::run(&arguments),
    };
    ended(outcome.map(|()| ExitCode::SUCCESS))
}

fn ended(outcome: Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        if !error.is::<OutputClosed>() {
            // It may quote what another process wrote.
            let text = format!("{error:#}");
            eprintln!("error: {}", text.split('\n').map(printable).collect::<Vec<_>>().join("\n"));
        }
        ExitCode::FAILURE
    })
}
