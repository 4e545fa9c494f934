//! The program `device-ipc`: lists devices and exports, shares tensors between terminals, and diagnoses a machine.

mod attach;
mod demo;
mod devices;
mod doctor;
mod exporter;
mod memory;
mod progress;
mod ps;
mod recv;
mod send;
mod transport;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use device_ipc::printable;
use device_ipc_cli::output::OutputClosed;

/// Share accelerator memory between processes
#[derive(Parser)]
#[command(name = "device-ipc", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List backends, devices and their peer access, with the reason for each unavailable backend
    Devices(devices::Arguments),
    /// Share a tensor with a child process that adds 1 in place, and verify that no copy was made
    Demo(demo::Arguments),
    /// List the exports of this user's processes on this machine, and the processes that lease them
    Ps(ps::Arguments),
    /// Share a tensor with receivers in other terminals: by a file, over TCP with a shared key, or as text
    Send(Box<send::Arguments>),
    /// Open a tensor that `send` shares, on any device, and print it, add to it or write it to a file
    Recv(Box<recv::Arguments>),
    /// Describe, read, fill or add to a tensor that another process shares
    Attach(Box<attach::Arguments>),
    /// Check this machine for problems that prevent sharing, and report how to fix them
    Doctor(doctor::Arguments),
    /// The child process of `doctor` that loads a library
    #[command(hide = true)]
    DoctorLibrary(doctor::libraries::Arguments),
    /// The child process of `doctor` that probes Ascend cards
    #[command(hide = true)]
    DoctorAscend(doctor::ascend_card::Arguments),
    /// The child process of `demo`
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
        Command::Doctor(arguments) => return exit_code(doctor::run(&arguments)),
        Command::DoctorLibrary(arguments) => doctor::libraries::run(&arguments),
        Command::DoctorAscend(arguments) => doctor::ascend_card::run(&arguments),
        Command::DemoReceiver(arguments) => demo::receiver::run(&arguments),
    };
    exit_code(outcome.map(|()| ExitCode::SUCCESS))
}

fn exit_code(outcome: Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        if !error.is::<OutputClosed>() {
            // The text may quote what another process wrote.
            let text = format!("{error:#}");
            eprintln!("error: {}", text.split('\n').map(printable).collect::<Vec<_>>().join("\n"));
        }
        ExitCode::FAILURE
    })
}
