//! The result of a check.

use std::fmt;

use device_ipc::printable;
use serde::Serialize;

use device_ipc_cli::output::{GREEN, RED, YELLOW};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// No action is required.
    Ok,
    /// Sharing is limited, or fails in some configurations.
    Warning,
    /// Sharing fails.
    Problem,
}

/// The result of one check.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    pub(super) verdict: Verdict,
    /// The observation and its meaning.
    pub(super) found: String,
    /// The action that fixes it, as a command where possible.
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

/// The text has a colored verdict.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verdict, style) = match self.verdict {
            Verdict::Ok => ("ok", GREEN),
            Verdict::Warning => ("warning", YELLOW),
            Verdict::Problem => ("problem", RED),
        };
        // The output of a program may have several lines, and escape sequences.
        let found = self.found.split('\n').map(printable).collect::<Vec<_>>().join("\n         ");
        write!(f, "{style}{verdict:8}{style:#} {}: {found}", self.check)?;
        match &self.change {
            Some(change) => write!(f, "\n         -> {change}"),
            None => Ok(()),
        }
    }
}
