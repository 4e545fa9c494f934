//! A line of the report: the measurements of both sides and the target.

use serde::Serialize;

use crate::statistics::Summary;

/// The unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Unit {
    Nanoseconds,
    BytesPerSecond,
    Count,
    /// Exponent of a power law: 1 is linear growth.
    Exponent,
}

/// The target of a line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Target {
    /// No target.
    None,
    /// Our time is at most `most` times the raw time plus `plus` nanoseconds.
    Times { most: f64, plus: f64 },
    /// Our speed is at least this fraction of the raw speed.
    Speed { least: f64 },
    /// Our value is at most this.
    Most { value: f64 },
}

impl Target {
    /// Returns the target that our time is at most `most` times the raw time.
    pub(super) const fn times(most: f64) -> Self {
        Self::Times { most, plus: 0.0 }
    }

    /// Returns whether these medians reach the target; `None` without a target or without a raw side.
    pub(super) fn reached(&self, ours: f64, raw: Option<f64>, ratio: Option<f64>) -> Option<bool> {
        match *self {
            Self::None => None,
            Self::Times { most, plus: 0.0 } => Some(ratio? <= most),
            Self::Times { most, plus } => Some(ours <= most * raw? + plus),
            Self::Speed { least } => Some(ratio? >= least),
            Self::Most { value } => Some(ours <= value),
        }
    }
}

/// The description of a measurement.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    /// The name of the measurement within its row.
    pub(super) case: String,
    /// The description of the raw side; empty without one.
    pub(super) against: String,
    pub(super) unit: Unit,
    pub(super) target: Target,
    /// Whether the target compares with the driver's own calls, so that only a run on hardware can judge it.
    pub(super) needs_hardware: bool,
    pub(super) note: Option<&'static str>,
}

impl Subject {
    /// Describes a time without a target, which any machine can judge.
    pub(super) fn new(case: impl Into<String>, against: impl Into<String>) -> Self {
        let (unit, target) = (Unit::Nanoseconds, Target::None);
        Self { case: case.into(), against: against.into(), unit, target, needs_hardware: false, note: None }
    }

    pub(super) fn unit(self, unit: Unit) -> Self {
        Self { unit, ..self }
    }

    pub(super) fn target(self, target: Target) -> Self {
        Self { target, ..self }
    }

    pub(super) fn needs_hardware(self, needs_hardware: bool) -> Self {
        Self { needs_hardware, ..self }
    }

    pub(super) fn note(self, note: impl Into<Option<&'static str>>) -> Self {
        Self { note: note.into(), ..self }
    }
}

/// The result of a measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Line {
    pub(super) row: &'static str,
    pub(super) case: String,
    pub(super) against: String,
    pub(super) unit: Unit,
    pub(super) ours: Option<Summary>,
    pub(super) raw: Option<Summary>,
    /// Our value divided by the raw value, per round.
    pub(super) ratio: Option<Summary>,
    pub(super) target: Target,
    /// `null` if the target cannot be judged here.
    pub(super) reached: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<String>,
    /// The reason why nothing was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) skipped: Option<String>,
    /// Points of the plot: count and nanoseconds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) points: Vec<(f64, f64)>,
}

impl Line {
    /// Creates a line from the samples of both sides, one pair per round.
    pub(super) fn of(
        row: &'static str,
        subject: Subject,
        samples: &[(f64, Option<f64>)],
        judged: bool,
    ) -> Self {
        let ours = Summary::of(samples.iter().map(|(ours, _)| *ours).collect());
        let raw = Summary::of(samples.iter().filter_map(|(_, raw)| *raw).collect());
        let ratio = Summary::of(samples.iter().filter_map(|(ours, raw)| Some(ours / (*raw)?)).collect());
        let median = |summary: Option<Summary>| summary.map(|summary| summary.median);
        let judged = judged || !subject.needs_hardware;
        let reached = median(ours)
            .filter(|_| judged)
            .and_then(|ours| subject.target.reached(ours, median(raw), median(ratio)));
        Self {
            row,
            case: subject.case,
            against: subject.against,
            unit: subject.unit,
            ours,
            raw,
            ratio,
            target: subject.target,
            reached,
            note: subject.note.map(str::to_owned),
            skipped: None,
            points: Vec::new(),
        }
    }

    /// Creates a line without a measurement, with the reason.
    pub(super) fn skipped(row: &'static str, case: impl Into<String>, reason: impl Into<String>) -> Self {
        let line = Self::of(row, Subject::new(case, ""), &[], false);
        Self { skipped: Some(reason.into()), ..line }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_judged_by_medians() {
        let allowed = Target::Times { most: 1.1, plus: 2000.0 };
        assert_eq!(allowed.reached(2100.0, Some(100.0), Some(21.0)), Some(true));
        assert_eq!(allowed.reached(2111.0, Some(100.0), Some(21.1)), Some(false));
        assert_eq!(allowed.reached(1.0, None, None), None);
        assert_eq!(Target::times(1.5).reached(9.0, Some(1.0), Some(1.4)), Some(true), "round by round");
        assert_eq!(Target::Speed { least: 0.98 }.reached(1.0, Some(1.0), Some(0.97)), Some(false));
        assert_eq!(Target::Most { value: 2.0 }.reached(2.0, None, None), Some(true));
        assert_eq!(Target::None.reached(1.0, Some(1.0), Some(1.0)), None);
    }

    #[test]
    fn hardware_targets_are_not_judged_without_hardware() {
        let subject = |needs_hardware| {
            Subject::new("one", "another").target(Target::times(1.0)).needs_hardware(needs_hardware)
        };
        let samples = [(2.0, Some(1.0)), (3.0, Some(1.0)), (4.0, Some(4.0))];
        assert_eq!(Line::of("row", subject(true), &samples, false).reached, None);
        assert_eq!(Line::of("row", subject(true), &samples, true).reached, Some(false));
        let line = Line::of("row", subject(false), &samples, false);
        assert_eq!((line.reached, line.ratio.expect("both sides were measured").median), (Some(false), 2.0));
    }
}
