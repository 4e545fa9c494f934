//! `device-ipc ps`: lists the exports of this user's processes, and the processes that lease them.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{Table, presets};
use device_ipc::front_end::{ListedExport, ListedProcess, list_exports};
use serde::Serialize;

use crate::arguments::{AllowArguments, positive_duration};
use crate::output::{escaped, json, line, warning, write_line};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also search this socket directory; default: DEVICE_IPC_SOCKET_DIR
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
    /// Timeout for the answers of all processes
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = positive_duration)]
    timeout: Duration,
    #[command(flatten)]
    allow: AllowArguments,
    /// Repeat the list until stopped, every 2 s or at this interval; with --json one object per line
    #[arg(
        long,
        value_name = "INTERVAL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2s",
        value_parser = positive_duration
    )]
    watch: Option<Duration>,
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

pub(crate) fn run(arguments: &Arguments, as_json: bool) -> Result<()> {
    let Some(interval) = arguments.watch else {
        let report = report(arguments)?;
        return if as_json { json(&report) } else { line(text(&report)) };
    };
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    loop {
        let report = report(arguments)?;
        // A reader that closes the pipe ends the repetition.
        if as_json {
            write_line(escaped(&serde_json::to_string(&report)?))?;
        } else {
            write_line(format_args!("{clear}{}", text(&report)))?;
        }
        std::thread::sleep(interval);
    }
}

/// Escape sequences that move the cursor to the top left of a terminal and erase everything below.
const CLEAR: &str = "\x1b[H\x1b[2J";

fn report(arguments: &Arguments) -> Result<Report> {
    let mut report = Report { processes: Vec::new(), unanswered: Vec::new() };
    for process in list_exports(arguments.socket_dir.as_deref(), &arguments.allow.list(), arguments.timeout)?
    {
        match process {
            Ok(process) => report.processes.push(process.into()),
            Err(error) => report.unanswered.push(error.to_string()),
        }
    }
    for error in &report.unanswered {
        warning(format_args!("cannot query a process that shares memory: {error}"));
    }
    Ok(report)
}

fn text(report: &Report) -> String {
    if report.processes.iter().all(|process| process.exports.is_empty()) {
        return "no process of this user shares memory".into();
    }
    table(report).to_string()
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
        .map(|holder| {
            format!("{} {} for {} s, {}", holder.pid, holder.program, seconds(holder.held_ms), holder.state)
        })
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
