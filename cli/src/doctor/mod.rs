//! `device-ipc doctor`: diagnoses what prevents sharing on this machine, and how to fix it.
//!
//! Each check is a function of [`Facts`], which tests create in a temporary root directory, so that every verdict is tested.
//! Properties that no file describes are probed: a child process opens a tensor on each device. Vendor libraries are loaded
//! only in child processes, because a driver may crash or hang.

mod ascend;
pub(crate) mod ascend_card;
mod devices;
mod facts;
mod finding;
pub(crate) mod libraries;
mod nvidia;
mod process;
mod round_trip;
mod system;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::arguments::positive_duration;
use device_ipc_cli::output::{line, notice};
use facts::Facts;
use finding::{Finding, Verdict};
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
  device-ipc doctor --backend cuda --json
  device-ipc doctor --backend ascend      (also probes the cards)
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
        let printed = if json { Ok(()) } else { line(&finding) };
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
        let ascend =
            libraries.iter().any(|library| library.name == "ascend" && library.available().is_some());
        if ascend && selected == Some("ascend") {
            if !json {
                notice("probing the Ascend cards");
            }
            for finding in ascend_card::findings(timeout) {
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

/// Returns the findings of all checks except the round trips.
fn inspect(facts: &Facts, libraries: &[Library], selected: Option<&str>) -> Vec<Finding> {
    let concerns = |name: &str| selected.is_none_or(|selected| selected == name);
    let mut findings = libraries::check(facts, libraries, selected);
    findings.push(devices::selection(facts, libraries));
    findings.extend(libraries.iter().filter_map(devices::peer_access));
    findings.extend(devices::visible(facts, concerns));
    if concerns("cuda") {
        findings.extend(libraries.iter().filter(|library| library.name == "cuda").filter_map(nvidia::mps));
        findings.extend(nvidia::check(facts));
    }
    if concerns("ascend") {
        findings.extend(ascend::check(facts, libraries));
    }
    findings.extend(system::check(facts));
    findings
}
