//! The program `device-ipc`: lists devices and exports, shares tensors between terminals, and diagnoses a machine.
//!
//! [`main`] is the whole program. It names no backend: a program with a further one links that backend's crate and calls it.

mod arguments;
mod attach;
pub mod child;
mod completions;
mod demo;
mod devices;
mod doctor;
mod exporter;
mod keep;
mod memory;
pub mod output;
mod progress;
mod ps;
mod recv;
pub mod selection;
mod send;
mod transcript;
mod transport;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use device_ipc::Error;
use device_ipc::front_end::printable;

use arguments::GlobalArguments;
use output::{OutputClosed, RED, UsageError};

/// Exit code of wrong usage, as clap has it.
const WRONG_USAGE: u8 = 2;

/// Share accelerator memory between processes
#[derive(Parser)]
#[command(name = "device-ipc", version, arg_required_else_help = true, after_help = EXIT_CODES)]
struct Arguments {
    #[command(flatten)]
    global: GlobalArguments,
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 success; 1 failure, or a problem that 'doctor' found; 2 wrong usage: an unknown option, name or value.";

#[derive(Subcommand)]
enum Command {
    /// List backends, devices and their peer access, with the reason for each unavailable backend
    Devices(devices::Arguments),
    /// Share a tensor with a child process that adds 1 in place, and verify that no copy was made
    Demo(demo::Arguments),
    /// List the exports of this user's processes on this machine, and the processes that lease them
    Ps(ps::Arguments),
    /// Share a tensor with receivers in other terminals: by a file or as text
    Send(Box<send::Arguments>),
    /// Open a tensor that `send` shares, on any device, and print it, add to it or write it to a file
    Recv(Box<recv::Arguments>),
    /// Describe, read, fill or add to a tensor that another process shares
    Attach(Box<attach::Arguments>),
    /// Keep the weights of a model in device memory under a name, for processes that start and end as they like
    Keep(Box<keep::Arguments>),
    /// Check this machine for problems that prevent sharing, and report how to fix them
    Doctor(doctor::Arguments),
    /// Print a completion script for a shell
    Completions(completions::Arguments),
    /// Print the manual page of this program, or write the pages of all commands to a directory
    Man(completions::ManArguments),
}

/// The commands of child processes of this program. They are not commands of [`Arguments`], so that no help, completion or
/// suggestion names them.
#[derive(Parser)]
enum ChildCommand {
    /// Loads a library for `doctor`
    #[command(name = "__doctor-library")]
    DoctorLibrary(doctor::libraries::Arguments),
    /// Uses the devices of a backend for `doctor`
    #[command(name = "__doctor-probe")]
    DoctorProbe(doctor::probe::Arguments),
    /// Opens the tensor of `demo`
    #[command(name = "__demo-receiver")]
    DemoReceiver(demo::receiver::Arguments),
}

/// Runs the program with the arguments of this process, and returns its exit code.
///
/// Child processes run the program of this process again, with arguments that only this function knows.
pub fn main() -> ExitCode {
    let first = std::env::args_os().nth(1);
    // An unknown name is an error of `Arguments`, which suggests only its own commands.
    let is_child = first.is_some_and(|first| {
        first.as_encoded_bytes().starts_with(b"__")
            && ChildCommand::command().find_subcommand(&first).is_some()
    });
    exit_code(if is_child { run_child(ChildCommand::parse()) } else { run(&parse()) })
}

fn parse() -> Arguments {
    let given: Vec<_> = std::env::args_os().collect();
    let color = arguments::color_of_help(given.iter().map(AsRef::as_ref));
    let matches = Arguments::command().color(color).get_matches_from(given);
    Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    arguments.global.apply();
    let json = arguments.global.json;
    match &arguments.command {
        Command::Devices(arguments) => devices::run(arguments, json),
        Command::Demo(arguments) => demo::run(arguments, json),
        Command::Ps(arguments) => ps::run(arguments, json),
        Command::Send(arguments) => send::run(arguments, json),
        Command::Recv(arguments) => recv::run(arguments, json),
        Command::Attach(arguments) => attach::run(arguments, json),
        Command::Keep(arguments) => keep::run(arguments, json),
        Command::Doctor(arguments) => return doctor::run(arguments, json),
        Command::Completions(arguments) => completions::run(arguments, Arguments::command()),
        Command::Man(arguments) => completions::run_man(arguments, Arguments::command()),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn run_child(command: ChildCommand) -> Result<ExitCode> {
    match &command {
        ChildCommand::DoctorLibrary(arguments) => doctor::libraries::run(arguments),
        ChildCommand::DoctorProbe(arguments) => doctor::probe::run(arguments),
        ChildCommand::DemoReceiver(arguments) => demo::receiver::run(arguments),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn exit_code(outcome: Result<ExitCode>) -> ExitCode {
    let error = match outcome {
        Ok(code) => return code,
        Err(error) => error,
    };
    if !error.is::<OutputClosed>() {
        // The text may quote what another process wrote.
        let text = format!("{error:#}");
        let text = text.split('\n').map(printable).collect::<Vec<_>>().join("\n");
        anstream::eprintln!("{RED}error:{RED:#} {text}");
    }
    let is_usage = |error: &(dyn std::error::Error + 'static)| {
        // The name of a backend in DEVICE_IPC_BACKEND is a value, too.
        error.is::<UsageError>() || matches!(error.downcast_ref(), Some(Error::UnknownBackend { .. }))
    };
    if error.chain().any(is_usage) { ExitCode::from(WRONG_USAGE) } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
        ChildCommand::command().debug_assert();
    }
}
