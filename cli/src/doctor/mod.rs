//! `device-ipc doctor`: diagnoses what prevents sharing on this machine, and how to fix it.
//!
//! Each check is a function of [`Facts`], which tests create in a temporary root directory, so that every verdict is tested.
//! Properties that no file describes are probed: a child process opens a tensor on each device. Vendor libraries are loaded
//! only in child processes, because a driver may crash or hang. What concerns one vendor is checked by its backend
//! ([`Diagnosis`](device_ipc::backend::Diagnosis)).

mod devices;
mod facts;
pub(crate) mod libraries;
pub(crate) mod probe;
mod process;
mod round_trip;
mod system;

use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use device_ipc::backend::{Finding, Verdict};
use device_ipc::front_end::printable;
use serde::Serialize;

use crate::arguments::positive_duration;
use crate::output::{GREEN, RED, YELLOW, line, notice};
use facts::Facts;
use libraries::Library;

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Check only this backend; its unavailability is a problem
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::backend())]
    backend: Option<String>,
    /// Skip the round trips through child processes
    #[arg(long)]
    quick: bool,
    /// Timeout for loading each vendor library and for each round trip; creating the first context on a device can take many
    /// seconds
    #[arg(long, value_name = "DURATION", default_value = "90s", value_parser = positive_duration)]
    timeout: Duration,
}

const EXAMPLES: &str = "\
The verdict of each check is ok, warning (sharing is limited) or problem (sharing fails), with the command or setting \
that fixes it. The exit code is 1 if there is a problem, otherwise 0.

Examples:
  device-ipc doctor
  device-ipc doctor --json
  device-ipc doctor --backend mock        (also probes the devices of this backend)
  device-ipc doctor --quick";

#[derive(Serialize)]
struct Report {
    problems: usize,
    warnings: usize,
    checks: Vec<Finding>,
}

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<ExitCode> {
    let mut report = Report { problems: 0, warnings: 0, checks: Vec::new() };
    let selected = arguments.backend.as_deref();
    let facts = Facts::of_this_machine();
    let timeout = arguments.timeout;
    let libraries = libraries::of_this_machine(selected, timeout);
    let report_finding = |report: &mut Report, finding: Finding| {
        report.problems += usize::from(finding.verdict == Verdict::Problem);
        report.warnings += usize::from(finding.verdict == Verdict::Warning);
        let printed = if json { Ok(()) } else { line(Shown(&finding)) };
        report.checks.push(finding);
        printed
    };
    for finding in inspect(&facts, &libraries, selected) {
        report_finding(&mut report, finding)?;
    }
    if !arguments.quick {
        for round_trip in round_trip::round_trips(&libraries, selected) {
            if !json {
                notice(format_args!("trying {round_trip}"));
            }
            report_finding(&mut report, round_trip.run(timeout))?;
        }
        // The user names a backend to learn more of it, and probes take long.
        for library in libraries.iter().filter(|library| selected.is_some() && library.available().is_some())
        {
            if !json {
                notice(format_args!("probing the devices of {}", library.name()));
            }
            for finding in probe::findings(library, timeout) {
                report_finding(&mut report, finding)?;
            }
        }
    }
    if json {
        line(serde_json::to_string_pretty(&report)?)?;
    } else {
        line(format_args!("\n{} problem(s), {} warning(s)", report.problems, report.warnings))?;
    }
    Ok(if report.problems > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the findings of all checks except the round trips and probes.
fn inspect(facts: &Facts, libraries: &[Library], selected: Option<&str>) -> Vec<Finding> {
    let mut findings = libraries::check(facts, libraries, selected);
    findings.push(devices::selection(facts, libraries));
    findings.extend(libraries.iter().filter_map(devices::peer_access));
    for library in libraries {
        let available = library.available();
        findings.extend(available.iter().flat_map(|available| available.findings.iter().cloned()));
        if let Some(diagnosis) = library.diagnosis() {
            findings.extend(diagnosis.check_machine(&facts.machine, available.is_some()));
        }
    }
    findings.extend(system::check(facts, libraries));
    findings
}

/// A finding as text, with a colored verdict.
struct Shown<'a>(&'a Finding);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { check, verdict, found, change, .. } = self.0;
        let (verdict, style) = match verdict {
            Verdict::Ok => ("ok", GREEN),
            Verdict::Warning => ("warning", YELLOW),
            Verdict::Problem => ("problem", RED),
        };
        // The output of a program may have several lines, and escape sequences.
        let found = found.split('\n').map(printable).collect::<Vec<_>>().join("\n         ");
        write!(f, "{style}{verdict:8}{style:#} {check}: {found}")?;
        match change {
            Some(change) => write!(f, "\n         -> {change}"),
            None => Ok(()),
        }
    }
}
