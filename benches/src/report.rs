//! The report as Markdown and JSON.

use std::fmt::Write as _;

use serde::Serialize;

use crate::line::{Line, Target, Unit};
use crate::machine::Machine;
use crate::statistics::Summary;

/// Version of the JSON schema, which `docs/internals/performance.md` describes.
const SCHEMA: u32 = 1;

/// All measurements of a run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: u32,
    pub(super) machine: Machine,
    /// Number of rounds of each comparison.
    rounds: usize,
    pub(super) lines: Vec<Line>,
}

/// Prefix of the reason of a row that failed, in contrast to one that was skipped.
pub(super) const FAILED: &str = "failed: ";

const HEADINGS: [&str; 7] = ["row", "measurement", "ours", "raw", "ratio (p10 to p90)", "target", "reached"];

impl Report {
    pub(super) fn new(machine: Machine, rounds: usize, lines: Vec<Line>) -> Self {
        Self { schema: SCHEMA, machine, rounds, lines }
    }

    pub(super) fn markdown(&self) -> String {
        let mut text = format!("{}\n\n| {} |\n|{}\n", self.heading(), HEADINGS.join(" | "), "---|".repeat(7));
        for line in &self.lines {
            let _ = writeln!(text, "| {} |", cells(line).join(" | "));
        }
        let notes = self.lines.iter().filter_map(|line| Some((line, line.note.as_ref()?)));
        for (index, (line, note)) in notes.enumerate() {
            let before = if index == 0 { "\n" } else { "" };
            let _ = writeln!(text, "{before}- {}, {}: {note}", line.row, line.case);
        }
        let missed = self.lines.iter().filter(|line| line.reached == Some(false)).count();
        let judged = self.lines.iter().filter(|line| line.reached.is_some()).count();
        let _ = write!(text, "\n{} of {judged} targets reached", judged - missed);
        if !self.machine.hardware {
            text.push_str(
                "; targets that compare with the driver's own calls require hardware and are not judged here",
            );
        }
        text
    }

    fn heading(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{}, {} ({} processors), Linux {}; {} ({}): {}; device-ipc {} at {}; {} rounds",
            machine.date,
            machine.processor,
            machine.processors,
            machine.kernel,
            machine.backend,
            machine.driver,
            machine.devices.join(", "),
            machine.version,
            machine.commit,
            self.rounds
        );
        if !machine.optimised {
            text.push_str(". NOT OPTIMISED: build with --release");
        }
        text
    }
}

fn cells(line: &Line) -> Vec<String> {
    let shown =
        |summary: Option<Summary>| summary.map_or_else(|| "-".into(), |one| number(one.median, line.unit));
    let ratio = line.ratio.map_or_else(
        || "-".into(),
        |ratio| format!("{} ({} to {})", times(ratio.median), times(ratio.p10), times(ratio.p90)),
    );
    let reached = match (&line.skipped, line.reached) {
        (Some(reason), _) if reason.starts_with(FAILED) => reason.clone(),
        (Some(reason), _) => format!("skipped: {reason}"),
        (None, Some(true)) => "yes".into(),
        (None, Some(false)) => "NO".into(),
        (None, None) => "-".into(),
    };
    vec![
        line.row.to_owned(),
        line.case.clone(),
        shown(line.ours),
        shown(line.raw),
        ratio,
        target(line),
        reached,
    ]
}

/// Formats a ratio with at least two significant digits.
fn times(ratio: f64) -> String {
    if ratio.abs() < 0.1 { format!("{ratio:.4}") } else { format!("{ratio:.2}") }
}

fn target(line: &Line) -> String {
    match line.target {
        Target::None => "-".into(),
        Target::Times { most, plus: 0.0 } => format!("at most {most} times"),
        Target::Times { most, plus } => {
            format!("at most {most} times and {}", number(plus, Unit::Nanoseconds))
        }
        Target::Speed { least } => format!("at least {least} of the speed"),
        Target::Most { value } => format!("at most {}", number(value, line.unit)),
    }
}

/// Formats a value with three significant digits and its unit.
fn number(value: f64, unit: Unit) -> String {
    let scaled = |steps: &[(f64, &str)]| {
        let (scale, name) = steps.iter().rev().find(|(scale, _)| value.abs() >= *scale).unwrap_or(&steps[0]);
        let scaled = value / scale;
        let digits = if scaled.abs() >= 100.0 { 0 } else { 2 - usize::from(scaled.abs() >= 10.0) };
        format!("{scaled:.digits$} {name}")
    };
    match unit {
        Unit::Nanoseconds => scaled(&[(1.0, "ns"), (1e3, "µs"), (1e6, "ms"), (1e9, "s")]),
        Unit::BytesPerSecond => scaled(&[(1e6, "MB/s"), (1e9, "GB/s")]),
        Unit::Count => format!("{value}"),
        Unit::Exponent => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_has_three_digits_and_a_unit() {
        let time = |value| number(value, Unit::Nanoseconds);
        assert_eq!(
            (time(0.512), time(98.76), time(204.4)),
            ("0.51 ns".into(), "98.8 ns".into(), "204 ns".into())
        );
        assert_eq!((time(15_200.0), time(1.234e6)), ("15.2 µs".into(), "1.23 ms".into()));
        assert_eq!(number(394.8e9, Unit::BytesPerSecond), "395 GB/s");
        assert_eq!(number(2.0, Unit::Count), "2");
    }
}
