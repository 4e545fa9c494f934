//! `device-ipc ps`: lists the exports of this user's processes, and the processes that lease them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{Table, presets};
use device_ipc::{AllowList, ListedExport, ListedProcess, list_exports};
use serde::Serialize;

use device_ipc_cli::output::{json, line};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also search this socket directory; default: DEVICE_IPC_SOCKET_DIR
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
    /// Timeout for the answers of all processes, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    timeout: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    processes: Vec<ProcessReport>,
    /// Errors of processes that share memory and did not answer.
    unanswered: Vec<String>,
}

#[derive(Serialize)]
struct ProcessReport {
    pid: u32,
    program: String,
    socket: String,
    exports: Vec<ListedExport>,
}

impl From<ListedProcess> for ProcessReport {
    fn from(process: ListedProcess) -> Self {
        Self {
            pid: process.pid,
            program: process.program,
            socket: process.socket.to_string(),
            exports: process.exports,
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let timeout = Duration::from_millis(arguments.timeout);
    let mut report = Report { processes: Vec::new(), unanswered: Vec::new() };
    for process in list_exports(arguments.socket_dir.as_deref(), &AllowList::own_user(), timeout)? {
        match process {
            Ok(process) => report.processes.push(process.into()),
            Err(error) => report.unanswered.push(error.to_string()),
        }
    }
    if arguments.json {
        return json(&report);
    }
    for error in &report.unanswered {
        eprintln!("warning: cannot query a process that shares memory: {error}");
    }
    if report.processes.iter().all(|process| process.exports.is_empty()) {
        return line("no process of this user shares memory");
    }
    line(table(&report))
}

fn table(report: &Report) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["pid", "program", "export", "backend", "bytes", "age (s)", "opened", "held by"]);
    for process in &report.processes {
        for export in &process.exports {
            let number = if export.dropped {
                format!("{} (dropped)", export.export)
            } else {
                export.export.to_string()
            };
            table.add_row([
                process.pid.to_string(),
                process.program.clone(),
                number,
                export.backend.clone(),
                export.bytes.to_string(),
                seconds(export.age_ms),
                export.opened.to_string(),
                holders(export),
            ]);
        }
    }
    table
}

fn holders(export: &ListedExport) -> String {
    if export.held_by == 0 {
        return "no process".into();
    }
    let shown = export.holders.iter();
    let mut lines: Vec<String> = shown
        .map(|holder| format!("{} {} for {} s", holder.pid, holder.program, seconds(holder.held_ms)))
        .collect();
    let more = export.held_by - export.holders.len() as u64;
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines.join("\n")
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.1}", milliseconds as f64 / 1000.0)
}
