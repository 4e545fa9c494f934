//! A case, and the functions that its other processes run.

use crate::context::Context;
use crate::outcome::Outcome;

/// The function that a process of the suite runs.
pub type Body = fn(&Context) -> Outcome;

/// One case of the suite.
#[derive(Clone, Debug)]
pub struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: Body,
    pub(crate) roles: Vec<(&'static str, Body)>,
}

impl Case {
    /// The case of this name: that of its function.
    pub const fn new(name: &'static str, run: Body) -> Self {
        Self { name, run, roles: Vec::new() }
    }

    /// Adds what another process of the case runs: [`Context::peer`] starts it.
    pub fn role(mut self, name: &'static str, run: Body) -> Self {
        self.roles.push((name, run));
        self
    }

    pub(crate) fn body(&self, role: &str) -> Option<Body> {
        match role {
            MAIN_ROLE => Some(self.run),
            AGENT_ROLE => Some(crate::agent::run),
            _ => self.roles.iter().find(|(name, _)| *name == role).map(|(_, run)| *run),
        }
    }
}

/// The process that decides.
pub(crate) const MAIN_ROLE: &str = "main";

/// The role of an agent.
pub(crate) const AGENT_ROLE: &str = "agent";
