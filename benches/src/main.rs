//! `device-ipc-bench`: measures the cost of sharing on this machine beside the driver's own calls, in one run.
//!
//! Each row is a file in `rows/`. It sets up its state and passes one closure per side to the frame, which runs both in turn
//! for many rounds. The ratio is computed per round, so that a disturbance of the machine affects both sides.

mod frame;
mod line;
mod machine;
mod peer;
mod raw;
mod report;
mod rows;
mod statistics;
mod wait;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use device_ipc::AllowList;

use device_ipc_cli::output::line;
use device_ipc_cli::selection::select_backend;
use frame::{Bench, Row};
use line::Line;
use machine::Machine;
use report::{FAILED, Report};

/// Measure the cost of sharing on this machine beside the driver's own calls
#[derive(Parser)]
#[command(name = "device-ipc-bench", version, args_conflicts_with_subcommands = true)]
struct Program {
    #[command(flatten)]
    arguments: Arguments,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// The peer process of a measurement
    #[command(hide = true)]
    Peer(peer::Arguments),
}

#[derive(clap::Args)]
struct Arguments {
    /// Backend to use; default: the first that has a device, or the mock where none has
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Measure only this row; can be repeated; see --list
    #[arg(long = "row", value_name = "NAME")]
    rows: Vec<String>,
    /// List the rows and exit
    #[arg(long)]
    list: bool,
    /// Number of rounds of each comparison
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Ordinal of this process's device
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Ordinal of the peer's device in rows across devices; default: the next device after --device
    #[arg(long, value_name = "N")]
    other: Option<u32>,
    /// Number of importing processes in the row 'many'
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    importers: u32,
    /// Number of exports in the row 'many'
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(8..=100_000))]
    exports: u32,
    /// Number of allocations for the 1000 tensors of 1 MiB in the row 'state-dict'; PyTorch's allocator uses 500 of 2 MiB
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1000))]
    allocations: u32,
    /// Size of the weights in the row 'weights' in MiB; default: 16384 on hardware, otherwise 16
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    weights: Option<u32>,
    /// Number of buckets in the row 'weights'; with more buckets, a full stream queue may block the host
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=64))]
    buckets: u32,
    /// Number of ring slots in the row 'weights', each of the size of a bucket
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    slots: u32,
    /// Write the report as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let program = Program::parse();
    let outcome = match &program.command {
        Some(Command::Peer(arguments)) => peer::run(arguments),
        None => run(&program.arguments),
    };
    if let Err(error) = outcome {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.list {
        return rows::ROWS.iter().try_for_each(|row| line(format!("{:<18} {}", row.name, row.title)));
    }
    let rows = selected_rows(&arguments.rows)?;
    // Reports an unwritable file before the measurement, which takes minutes.
    arguments.json.as_deref().map_or(Ok(()), |path| write(path, ""))?;
    let mut bench = prepare(arguments)?;
    let machine = Machine::of(&bench.ipc, bench.hardware)?;
    let mut lines = Vec::new();
    for row in rows {
        bench.row = row.name;
        // A failed row is a line of the report; the other rows are still measured.
        let measured = (row.run)(&bench);
        lines.extend(measured.unwrap_or_else(|error| vec![bench.skipped("", format!("{FAILED}{error:#}"))]));
    }
    let report = Report::new(machine, arguments.rounds as usize, lines);
    line(report.markdown())?;
    if let Some(path) = &arguments.json {
        write(path, &format!("{}\n", serde_json::to_string_pretty(&report)?))?;
    }
    let failed = |line: &&Line| line.skipped.as_ref().is_some_and(|why| why.starts_with(FAILED));
    match report.lines.iter().filter(failed).count() {
        0 => Ok(()),
        failed => bail!("{failed} row(s) failed; see the reasons in the table"),
    }
}

fn prepare(arguments: &Arguments) -> Result<Bench> {
    let ipc = select_backend(arguments.backend.as_deref(), AllowList::own_user())?.ipc;
    let count = ipc.devices()?.len() as u32;
    let device = arguments.device;
    let other = arguments.other.unwrap_or(if count > 1 { (device + 1) % count } else { device });
    for (option, ordinal) in [("--device", device), ("--other", other)] {
        if ordinal >= count {
            bail!(
                "{option} {ordinal} is out of range: the backend {} has {count} device(s), numbered from 0; list them with \
                 'device-ipc devices'",
                ipc.backend().info().name
            );
        }
    }
    let hardware = ipc.backend().info().name != device_ipc::mock::NAME && !is_simulated();
    let weights = arguments.weights.unwrap_or(if hardware { 16 << 10 } else { 16 });
    Ok(Bench {
        raw: raw::of(&ipc)?,
        hardware,
        weights: u64::from(weights) << 20,
        buckets: arguments.buckets as usize,
        slots: arguments.slots,
        ipc,
        device,
        other,
        rounds: arguments.rounds as usize,
        importers: arguments.importers as usize,
        exports: arguments.exports as usize,
        allocations: arguments.allocations as usize,
        row: "",
    })
}

/// Returns whether the vendor library is a simulator; its machine is described by a variable with this prefix.
fn is_simulated() -> bool {
    std::env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with("DEVICE_IPC_SIM_"))
}

fn selected_rows(names: &[String]) -> Result<Vec<&'static Row>> {
    let known = || rows::ROWS.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
    if let Some(unknown) = names.iter().find(|name| rows::ROWS.iter().all(|row| row.name != **name)) {
        bail!("--row {unknown} not found; available rows: {}", known());
    }
    let selected = |row: &&Row| names.is_empty() || names.iter().any(|name| name == row.name);
    Ok(rows::ROWS.iter().filter(selected).collect())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
