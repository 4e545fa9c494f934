//! What a check found.

use std::fmt;

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// Nothing to do.
    Ok,
    /// Something is limited, or may be in the way of some.
    Warning,
    /// Something will not work.
    Problem,
}

/// The outcome of one check.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    pub(super) verdict: Verdict,
    /// What there is, and what it means.
    pub(super) found: String,
    /// What to do about it: where it can be, the line to type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) change: Option<String>,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Ok, found: found.into(), change: None }
    }

    pub(super) fn warning(check: &'static str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Warning, found: found.into(), change: Some(change.into()) }
    }

    pub(super) fn problem(check: &'static str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Problem, found: found.into(), change: Some(change.into()) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Warning => "warning",
            Verdict::Problem => "problem",
        };
        // What a program said may have several lines.
        let found = self.found.replace('\n', "\n         ");
        write!(f, "{verdict:8} {}: {found}", self.check)?;
        match &self.change {
            Some(change) => write!(f, "\n         -> {change}"),
            None => Ok(()),
        }
    }
}
