//! Hands memory over between processes for a long time, and fails where a process has grown.
//!
//! Why: what leaks once per hand-over passes every suite of short tests, and takes a server down after a day. The program
//! is written as a user would write it, on the public interface with its defaults, and runs on every backend:
//!
//! ```text
//! cargo run --release -p device-ipc-soak                                  # 200,000 rounds of every row
//! cargo run --release -p device-ipc-soak -- --rounds 5000 --rows ready    # a shorter run of one row
//! ```
//!
//! Each row runs in a new pair of processes. After a warm-up both are measured; after the rounds they are measured again.
//! The row passes if resident memory, heap, descriptors, mappings, threads, device memory and the library's own gauges are
//! where they were.

mod importer;
mod partner;
mod report;
mod rows;
mod sizes;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use device_ipc_test_process::CountingHeap;

use rows::Row;

#[global_allocator]
static ALLOCATOR: CountingHeap = CountingHeap;

/// Time limit for everything that normally takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Hand memory over between two processes for a long time, and fail where one of them grows.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Rounds of each row, after the warm-up
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Rounds before the first measurement
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    warm_up: u64,
    /// The rows to run, separated by commas; all that the backend supports if not given
    #[arg(long, value_delimiter = ',')]
    rows: Vec<Row>,
    /// Device that the memory is allocated on and opened on
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// In the row `killed`: rounds after which an importer is killed
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    kill_every: u64,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// The importing process of a row, which the program starts itself
    #[command(hide = true)]
    Importer { device: u32 },
    /// The exporting process of a row, which the program starts itself
    #[command(hide = true)]
    Exporter { row: Row },
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.role {
        None => run(&options),
        Some(Role::Importer { device }) => importer::serve(device),
        Some(Role::Exporter { row }) => rows::run(row, &options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every row in processes of its own, so that none inherits the memory of another.
fn run(options: &Options) -> Result<()> {
    let rows = if options.rows.is_empty() { Row::supported()? } else { options.rows.clone() };
    println!("{}", report::HEADER);
    let mut grown = Vec::new();
    for row in rows {
        if !partner::run_row(row, options)? {
            grown.push(row.name());
        }
    }
    ensure!(grown.is_empty(), "these rows failed: {}", grown.join(", "));
    Ok(())
}
