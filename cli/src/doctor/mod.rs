//! `device-ipc doctor`: what on this machine would stop sharing, and what to change.
//!
//! Each check is a small function of [`Facts`], which come from a root directory that tests can make, so that both
//! outcomes of each are tested. What no file tells is tried: a second process takes a tensor on each device. This process loads
//! no vendor's library: a driver that crashes or hangs ends processes of their own.

mod ascend;
pub(crate) mod ascend_card;
mod devices;
mod facts;
mod finding;
pub(crate) mod libraries;
mod nvidia;
mod round_trip;
mod second;
mod system;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use device_ipc::Backends;
use serde::Serialize;

use device_ipc_cli::output::line;
use facts::Facts;
use finding::{Finding, Verdict};
use libraries::Library;

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// This backend only, and a problem where it cannot be used.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Look only: hand no tensor to a second process.
    #[arg(long)]
    quick: bool,
    /// How long the loading of a vendor's library may take, and each try; in seconds. The first context on a device can take
    /// many.
    #[arg(long, value_name = "SECONDS", default_value_t = 90, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Each check is ok, a warning (something is limited) or a problem (something will not work), with the line to type. The exit
code is 1 where there is a problem, else 0.

Examples:
  device-ipc doctor
  device-ipc doctor --backend cuda --json
  device-ipc doctor --backend ascend      (also what its cards say about points that nobody has seen on one)
  device-ipc doctor --quick";

#[derive(Serialize)]
struct Report {
    problems: usize,
    warnings: usize,
    checks: Vec<Finding>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(name) = &arguments.backend {
        let backends = Backends::registered();
        if !backends.names().any(|known| known == name) {
            // The error names those that there are.
            backends.named(name)?;
        }
    }
    let mut report = Report { problems: 0, warnings: 0, checks: Vec::new() };
    let wanted = arguments.backend.as_deref();
    let facts = Facts::of_this_machine();
    let time = Duration::from_secs(arguments.timeout);
    let libraries = libraries::of_this_machine(wanted, time);
    let tell = |report: &mut Report, finding: Finding| {
        report.problems += usize::from(finding.verdict == Verdict::Problem);
        report.warnings += usize::from(finding.verdict == Verdict::Warning);
        let said = if arguments.json { Ok(()) } else { line(&finding) };
        report.checks.push(finding);
        said
    };
    for finding in look(&facts, &libraries, wanted) {
        tell(&mut report, finding)?;
    }
    if !arguments.quick {
        for trip in round_trip::trips(&libraries, wanted) {
            if !arguments.json {
                eprintln!("trying {trip}");
            }
            tell(&mut report, trip.make(time))?;
        }
        let ascend = libraries.iter().any(|library| library.name == "ascend" && library.usable().is_some());
        if ascend && wanted == Some("ascend") {
            if !arguments.json {
                eprintln!("asking the Ascend cards what nobody has seen on one");
            }
            for finding in ascend_card::findings(time) {
                tell(&mut report, finding)?;
            }
        }
    }
    if arguments.json {
        line(serde_json::to_string_pretty(&report)?)?;
    } else {
        line(format_args!("\n{} problem(s), {} warning(s)", report.problems, report.warnings))?;
    }
    Ok(if report.problems > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Everything that can be seen without trying.
fn look(facts: &Facts, libraries: &[Library], wanted: Option<&str>) -> Vec<Finding> {
    let concerns = |name: &str| wanted.is_none_or(|wanted| wanted == name);
    let mut findings = libraries::check(facts, libraries, wanted);
    findings.extend(libraries.iter().filter_map(devices::peer_access));
    findings.extend(devices::visible(facts, concerns));
    if concerns("cuda") {
        findings.extend(nvidia::check(facts));
    }
    if concerns("ascend") {
        findings.extend(ascend::check(facts, libraries));
    }
    findings.extend(system::check(facts));
    findings
}
