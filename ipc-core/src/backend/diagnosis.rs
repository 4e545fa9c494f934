//! The vendor's part of `device-ipc doctor`.
//!
//! Only a backend knows the files of its driver, the variables that hide its devices, and the commands that repair them. The program
//! shows what it finds, and names no vendor itself.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::backend::DeviceIpc;
use crate::os::environment;

/// The checks that a backend adds to `device-ipc doctor`, by [`Registration::with_diagnosis`](super::Registration::with_diagnosis).
pub trait Diagnosis: fmt::Debug + Sync {
    /// Returns whether the machine appears to have the vendor's driver or devices. Their library is missing then, if it is not found.
    fn has_devices(&self, machine: &Machine) -> bool;

    /// Checks driver, device nodes and environment variables, by files alone. Loads no library. `is_available` states whether the
    /// backend was loaded and has a device.
    fn check_machine(&self, machine: &Machine, is_available: bool) -> Vec<Finding>;

    /// Checks the loaded backend, which has a device. Creates no context. Runs in a child process, which may crash or hang.
    fn check_backend(&self, backend: &dyn DeviceIpc) -> Vec<Finding> {
        let _ = backend;
        Vec::new()
    }

    /// Uses the devices, to find out how they behave. The program calls it for a backend that the user has named. Runs in a child
    /// process, which may crash or hang.
    fn probe_devices(&self) -> Vec<Finding> {
        Vec::new()
    }

    /// Returns the vendor's command or setting for a symptom that the program has observed.
    fn remedy(&self, symptom: Symptom<'_>) -> Option<&'static str> {
        let _ = symptom;
        None
    }
}

/// A failure for which a vendor may have a remedy of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Symptom<'a> {
    /// The library hangs or crashes when it is loaded.
    LibraryFails,
    /// Two devices cannot access each other's memory.
    NoPeerAccess,
    /// A child process cannot use the memory of its parent.
    RoundTripFails {
        /// The error, with the vendor's call and status.
        error: &'a str,
    },
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::exhaustive_enums, reason = "the exit code of the program depends on it")]
pub enum Verdict {
    /// No action is required.
    Ok,
    /// Sharing is limited, or fails in some configurations.
    Warning,
    /// Sharing fails.
    Problem,
}

/// The result of one check of `device-ipc doctor`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// The subject, equal for all verdicts.
    pub check: Cow<'static, str>,
    /// The severity.
    pub verdict: Verdict,
    /// The observation and its meaning.
    pub found: String,
    /// The action that fixes it, as a command where possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

impl Finding {
    /// Creates a finding that requires no action.
    pub fn ok(check: impl Into<Cow<'static, str>>, found: impl Into<String>) -> Self {
        Self { check: check.into(), verdict: Verdict::Ok, found: found.into(), change: None }
    }

    /// Creates a finding of a limit, with the action that removes it.
    pub fn warning(
        check: impl Into<Cow<'static, str>>,
        found: impl Into<String>,
        change: impl Into<String>,
    ) -> Self {
        Self {
            check: check.into(),
            verdict: Verdict::Warning,
            found: found.into(),
            change: Some(change.into()),
        }
    }

    /// Creates a finding of a failure, with the action that fixes it.
    pub fn problem(
        check: impl Into<Cow<'static, str>>,
        found: impl Into<String>,
        change: impl Into<String>,
    ) -> Self {
        Self { verdict: Verdict::Problem, ..Self::warning(check, found, change) }
    }
}

/// The files, the environment variables and the page size of a machine: of this one, or of one that a test creates below a directory.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
    variables: HashMap<String, String>,
    page_bytes: usize,
}

impl Machine {
    /// Returns this machine. Variables that are not UTF-8 are left out.
    pub fn this() -> Self {
        let variables = environment::variables()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self { root: PathBuf::from("/"), variables, page_bytes: rustix::param::page_size() }
    }

    /// Returns a machine whose files are those below a directory, without variables and with pages of 4096 B.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), variables: HashMap::new(), page_bytes: 4096 }
    }

    /// Sets an environment variable.
    pub fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the page size in bytes.
    pub const fn with_page_bytes(mut self, bytes: usize) -> Self {
        self.page_bytes = bytes;
        self
    }

    /// Returns the place of a file with an absolute path.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns whether a file exists.
    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Returns the text of a file; `None` if it cannot be read or is not UTF-8.
    pub fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok()
    }

    /// Returns the sorted names in a directory; empty if the directory does not exist.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Returns the value of an environment variable.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// Returns the page size in bytes.
    pub const fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Returns whether this process appears to run in a container.
    pub fn in_container(&self) -> bool {
        self.exists("/.dockerenv")
            || self.exists("/run/.containerenv")
            || self.variable("KUBERNETES_SERVICE_HOST").is_some()
    }
}
