//! `device-ipc-bench`: what sharing costs on this machine, beside the bare calls, measured in one run.
//!
//! A row is a file in `rows/`: it sets up what it needs, gives the frame one closure for each side, and the frame runs
//! them in turn for many rounds. The ratio of each round is taken, so that what disturbs the machine disturbs both sides.

mod counting;
mod frame;
mod line;
mod machine;
mod peer;
mod plot;
mod raw;
mod report;
mod rows;
mod statistics;
mod wait;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use indicatif::{MultiProgress, ProgressDrawTarget};

use device_ipc_cli::output::line;
use device_ipc_cli::selection::select_backend;
use frame::{Bench, Row};
use line::Line;
use machine::Machine;
use report::{FAILED, Report};

/// Measure what sharing costs on this machine beside the driver's own calls, in one run.
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
    /// The second process of a measurement.
    #[command(hide = true)]
    Peer(peer::Arguments),
}

#[derive(clap::Args)]
struct Arguments {
    /// This backend; the first that has a device unless given, and the mock where none has.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Only this row; may be given several times. See --list.
    #[arg(long = "row", value_name = "NAME")]
    rows: Vec<String>,
    /// List the rows and measure nothing.
    #[arg(long)]
    list: bool,
    /// Rounds of each comparison.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// This process's device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// The second process's device where a row crosses cards; another than this process's unless given.
    #[arg(long, value_name = "N")]
    other: Option<u32>,
    /// Importing processes of the row 'many'.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    importers: u32,
    /// Exports of the row 'many'.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(8..=100_000))]
    exports: u32,
    /// Allocations that the 1000 tensors of 1 MiB of the row 'state-dict' lie in; PyTorch's allocator takes 500 of 2 MiB.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1000))]
    allocations: u32,
    /// MiB of the row 'weights': 16384 on hardware and 16 elsewhere, unless given.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    weights: Option<u32>,
    /// Buckets that the row 'weights' hands them over in: more of them, and the stream's queue may hold the host.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=64))]
    buckets: u32,
    /// Slots of the ring of the row 'weights', each of a bucket's size.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    slots: u32,
    /// Write the result as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the result as a table in Markdown.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Draw the result.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// So that the row 'footprint' can tell what the library holds.
#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

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
    let rows = chosen(&arguments.rows)?;
    // Before the minutes that the measurement takes.
    let files = [&arguments.json, &arguments.markdown, &arguments.plot];
    files.into_iter().flatten().try_for_each(|path| write(path, ""))?;
    let mut bench = prepare(arguments)?;
    let machine = Machine::of(&bench.ipc, bench.hardware)?;
    let mut lines = Vec::new();
    for row in rows {
        bench.row = row.name;
        // A row that fails says why in its place, and the others are measured all the same.
        let measured = (row.run)(&bench);
        lines.extend(measured.unwrap_or_else(|error| vec![bench.skipped("", format!("{FAILED}{error:#}"))]));
    }
    let report = Report::new(machine, arguments.rounds as usize, lines);
    line(report.table())?;
    if let Some(path) = &arguments.json {
        write(path, &format!("{}\n", serde_json::to_string_pretty(&report)?))?;
    }
    if let Some(path) = &arguments.markdown {
        write(path, &report.markdown())?;
    }
    if let Some(path) = &arguments.plot {
        write(path, &plot::svg(&report))?;
    }
    let failed = |line: &&Line| line.skipped.as_ref().is_some_and(|why| why.starts_with(FAILED));
    match report.lines.iter().filter(failed).count() {
        0 => Ok(()),
        failed => bail!("{failed} row(s) could not be measured; the table says why"),
    }
}

fn prepare(arguments: &Arguments) -> Result<Bench> {
    let choice = select_backend(arguments.backend.as_deref())?;
    let ipc = choice.ipc;
    let count = ipc.devices()?.len() as u32;
    let device = arguments.device;
    let other = arguments.other.unwrap_or(if count > 1 { (device + 1) % count } else { device });
    for (option, ordinal) in [("--device", device), ("--other", other)] {
        if ordinal >= count {
            bail!(
                "{option} {ordinal}: the backend {} has {count} device(s), numbered from 0; see 'device-ipc devices'",
                ipc.backend().info().name
            );
        }
    }
    let progress = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
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
        progress,
    })
}

/// Does a library play the vendor's? Those of the tests are told their machine by such a variable.
fn is_simulated() -> bool {
    std::env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with("DEVICE_IPC_SIM_"))
}

fn chosen(names: &[String]) -> Result<Vec<&'static Row>> {
    let known = || rows::ROWS.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
    if let Some(unknown) = names.iter().find(|name| rows::ROWS.iter().all(|row| row.name != **name)) {
        bail!("--row {unknown}: there is no such row; there are {}", known());
    }
    let wanted = |row: &&Row| names.is_empty() || names.iter().any(|name| name == row.name);
    Ok(rows::ROWS.iter().filter(wanted).collect())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
