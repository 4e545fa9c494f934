//! A line of the result: what was measured, both sides, and whether that is enough.

use serde::Serialize;

use crate::statistics::Summary;

/// What numbers mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Unit {
    Nanoseconds,
    BytesPerSecond,
    Bytes,
    Count,
    /// How one number grows with another: 1 is a straight line.
    Exponent,
}

/// What is to be reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Target {
    /// Nothing: the line is there to be compared.
    None,
    /// Ours takes at most so many times as long as the bare side, and `plus` nanoseconds.
    Times { most: f64, plus: f64 },
    /// Ours has at least this part of the bare side's speed.
    Speed { least: f64 },
    /// Ours is at most this.
    Most { value: f64 },
}

impl Target {
    /// So many times as long at most.
    pub(super) const fn times(most: f64) -> Self {
        Self::Times { most, plus: 0.0 }
    }

    /// Is it reached by these medians? `None` where there is nothing to reach, or nothing to compare with.
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

/// What a line is about.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    /// Which of the row's measurements.
    pub(super) case: String,
    /// The bare side, in words; empty where there is none.
    pub(super) against: String,
    pub(super) unit: Unit,
    pub(super) target: Target,
    /// The target is about the driver's own calls, so that only hardware can tell whether it is reached.
    pub(super) needs_hardware: bool,
    pub(super) note: Option<&'static str>,
}

/// A measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Line {
    pub(super) row: &'static str,
    pub(super) case: String,
    pub(super) against: String,
    pub(super) unit: Unit,
    pub(super) ours: Option<Summary>,
    pub(super) raw: Option<Summary>,
    /// Ours by the bare side's, of each round.
    pub(super) ratio: Option<Summary>,
    pub(super) target: Target,
    /// `null` where it cannot be told here.
    pub(super) reached: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<String>,
    /// Why nothing was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) skipped: Option<String>,
    /// What a plot shows: counts and nanoseconds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) points: Vec<(f64, f64)>,
}

impl Line {
    /// From the samples of both sides, round by round.
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

    /// Nothing was measured, and why.
    pub(super) fn skipped(row: &'static str, case: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            row,
            case: case.into(),
            against: String::new(),
            unit: Unit::Nanoseconds,
            ours: None,
            raw: None,
            ratio: None,
            target: Target::None,
            reached: None,
            note: None,
            skipped: Some(why.into()),
            points: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_reached_by_the_medians_or_not() {
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
    fn what_only_hardware_can_tell_is_not_judged_without() {
        let subject = |needs_hardware| Subject {
            case: "one".into(),
            against: "another".into(),
            unit: Unit::Nanoseconds,
            target: Target::times(1.0),
            needs_hardware,
            note: None,
        };
        let samples = [(2.0, Some(1.0)), (3.0, Some(1.0)), (4.0, Some(4.0))];
        assert_eq!(Line::of("row", subject(true), &samples, false).reached, None);
        assert_eq!(Line::of("row", subject(true), &samples, true).reached, Some(false));
        let line = Line::of("row", subject(false), &samples, false);
        assert_eq!((line.reached, line.ratio.expect("there are two sides").median), (Some(false), 2.0));
    }
}
