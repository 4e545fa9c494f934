//! The vendors' libraries: there, of which version, or why not. Each is loaded by a process of its own.

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use device_ipc::{Backends, Error, Unavailable};
use serde::{Deserialize, Serialize};

use super::facts::Facts;
use super::finding::Finding;
use super::{ascend, nvidia, second};
use device_ipc_cli::output::line;

/// The backend that has no hardware.
const SIMULATED: &str = "mock";

/// The second process of `doctor` that loads a library: what it found, as JSON.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    backend: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    line(serde_json::to_string(&usable(&arguments.backend))?)
}

/// A backend with its library, or why it cannot be used.
pub(super) struct Library {
    pub(super) name: &'static str,
    pub(super) state: Result<Usable, Reason>,
}

/// A backend that has devices.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Usable {
    version: String,
    file: Option<String>,
    /// A row for each device: which devices it reaches.
    pub(super) peers: Vec<Vec<bool>>,
}

/// Why a backend cannot be used.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Reason {
    kind: Kind,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    NotFound,
    TooOld,
    Stub,
    /// It was loaded and crashed, or did not come to an end.
    Unhealthy,
    Other,
}

impl From<Unavailable> for Reason {
    fn from(reason: Unavailable) -> Self {
        let kind = match &reason {
            Unavailable::LibraryNotFound { .. } => Kind::NotFound,
            Unavailable::TooOld { .. } => Kind::TooOld,
            Unavailable::StubLibrary { .. } => Kind::Stub,
            _ => Kind::Other,
        };
        Self { kind, text: reason.to_string() }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Library {
    pub(super) fn usable(&self) -> Option<&Usable> {
        self.state.as_ref().ok()
    }

    pub(super) fn is_simulated(&self) -> bool {
        self.name == SIMULATED
    }
}

/// All backends, or one. Each may take so long.
pub(super) fn of_this_machine(only: Option<&str>, time: Duration) -> Vec<Library> {
    let backends = Backends::registered();
    let wanted = backends.names().filter(|name| only.is_none_or(|only| only == *name));
    wanted.map(|name| Library { name, state: asked(name, time) }).collect()
}

/// What a second process finds.
fn asked(name: &str, time: Duration) -> Result<Usable, Reason> {
    let unhealthy = |text| Reason { kind: Kind::Unhealthy, text };
    let printed = second::run(&["doctor-library", name], time)
        .map_err(|why| unhealthy(format!("a process that loads the library and lists the devices: {why}")))?;
    // A vendor's library may print lines of its own.
    let found = printed.lines().last().and_then(|last| serde_json::from_str(last).ok());
    found.unwrap_or_else(|| Err(unhealthy("a process that loads the library ended without a result".into())))
}

/// Loads the library, in this process.
fn usable(name: &str) -> Result<Usable, Reason> {
    let other = |error: Error| match error {
        Error::BackendUnavailable { reason, .. } => Reason::from(reason),
        error => Reason { kind: Kind::Other, text: error.to_string() },
    };
    let backend = Backends::registered().named(name).map_err(other)?;
    let devices = backend.devices().map_err(other)?;
    if devices.is_empty() {
        return Err(Unavailable::NoDevice { detail: "the backend lists none".into() }.into());
    }
    let row = |from| devices.iter().map(|to| backend.peer_access(from, to.ordinal)).collect::<Result<_, _>>();
    let peers = devices.iter().map(|from| row(from.ordinal)).collect::<Result<_, _>>().map_err(other)?;
    let info = backend.info();
    Ok(Usable { version: info.version.clone(), file: info.library.clone(), peers })
}

pub(super) fn check(facts: &Facts, libraries: &[Library], wanted: Option<&str>) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        libraries.iter().map(|library| one(facts, library, wanted.is_some())).collect();
    let accelerated = libraries.iter().any(|library| library.usable().is_some() && !library.is_simulated());
    if wanted.is_none() && !accelerated {
        findings.push(Finding::warning(
            "accelerator",
            "none can be used here, so only the mock shares memory",
            "nothing on a machine without one; else see the reasons above",
        ));
    }
    findings
}

fn one(facts: &Facts, library: &Library, wanted: bool) -> Finding {
    let (check, present) = match library.name {
        "cuda" => ("library of cuda", nvidia::is_there(facts)),
        "ascend" => ("library of ascend", ascend::is_there(facts)),
        SIMULATED => ("mock", false),
        _ => ("library of another backend", false),
    };
    let reason = match &library.state {
        Ok(usable) => return in_use(check, usable),
        Err(reason) => reason,
    };
    let change = "do what the reason says; 'device-ipc devices' shows it again";
    let text = reason.to_string();
    match reason.kind {
        // Loaded, and no good: somebody put it there.
        Kind::Stub => Finding::problem(
            check,
            text,
            "take the folder of stubs (stubs, devlib) out of LD_LIBRARY_PATH, and install or mount the driver",
        ),
        Kind::TooOld => Finding::problem(check, text, "install the newer version"),
        Kind::Unhealthy => Finding::problem(
            check,
            text,
            "look for the driver's errors (dmesg) and its own tool (nvidia-smi, npu-smi info); then: device-ipc devices",
        ),
        _ if present || wanted => Finding::problem(check, text, change),
        Kind::NotFound => Finding::ok(check, "not installed, and no card of the vendor is here"),
        Kind::Other => Finding::warning(check, text, change),
    }
}

fn in_use(check: &'static str, usable: &Usable) -> Finding {
    let file = usable.file.as_deref().map(|file| format!(", {file}")).unwrap_or_default();
    let found = format!("{}{file}, {} device(s)", usable.version, usable.peers.len());
    if usable.file.as_deref().is_some_and(|file| file.contains("/stubs/") || file.contains("/devlib/")) {
        let change = "take that folder out of LD_LIBRARY_PATH: what lies in it is for linking only";
        return Finding::problem(check, found, change);
    }
    Finding::ok(check, found)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::facts::tests::Machine;
    use super::super::finding::Verdict;
    use super::*;

    /// A library with devices that reach each other so.
    pub(in crate::doctor) fn with_peers(name: &'static str, peers: Vec<Vec<bool>>) -> Library {
        Library { name, state: Ok(Usable { version: "1.0".into(), file: None, peers }) }
    }

    fn without(name: &'static str, reason: Unavailable) -> Library {
        Library { name, state: Err(reason.into()) }
    }

    fn not_found() -> Unavailable {
        Unavailable::LibraryNotFound {
            searched: vec!["libcuda.so.1".into()],
            detail: "no such file".into(),
            hint: "Install it".into(),
        }
    }

    fn stub() -> Unavailable {
        Unavailable::StubLibrary { library: "libascendcl.so".into(), hint: "source set_env.sh".into() }
    }

    #[test]
    fn a_library_that_is_missing_matters_where_there_are_cards_or_where_it_was_asked_for() {
        let library = without("cuda", not_found());
        let bare = Machine::new();
        assert_eq!(one(&bare.facts, &library, false).verdict, Verdict::Ok);
        assert_eq!(one(&bare.facts, &library, true).verdict, Verdict::Problem);
        let machine = Machine::new().with("/dev/nvidiactl", "");
        let finding = one(&machine.facts, &library, false);
        assert!(finding.verdict == Verdict::Problem && finding.found.contains("Install it"), "{finding}");
        let machine = Machine::new().with("/dev/davinci_manager", "");
        assert_eq!(one(&machine.facts, &without("ascend", not_found()), false).verdict, Verdict::Problem);
    }

    #[test]
    fn a_library_that_is_there_and_no_good_is_told() {
        let bare = Machine::new();
        let finding = one(&bare.facts, &without("ascend", stub()), false);
        assert!(finding.verdict == Verdict::Problem && finding.found.contains("stub library"), "{finding}");
        let old = Unavailable::TooOld {
            library: "libcuda.so.1".into(),
            missing: "cuMemPoolCreate".into(),
            needed: "470".into(),
        };
        assert_eq!(one(&bare.facts, &without("cuda", old), false).verdict, Verdict::Problem);
        let hangs = Reason { kind: Kind::Unhealthy, text: "it did not end within 90 s".into() };
        let hangs = Library { name: "cuda", state: Err(hangs) };
        assert_eq!(one(&bare.facts, &hangs, false).verdict, Verdict::Problem);
        let none = Unavailable::NoDevice { detail: "none".into() };
        assert_eq!(one(&bare.facts, &without("cuda", none), false).verdict, Verdict::Warning);
        let mut stubs = with_peers("cuda", vec![vec![true]]);
        let Ok(usable) = &mut stubs.state else { unreachable!() };
        usable.file = Some("/usr/local/cuda/lib64/stubs/libcuda.so".into());
        assert_eq!(one(&bare.facts, &stubs, false).verdict, Verdict::Problem);
        assert_eq!(one(&bare.facts, &with_peers("cuda", vec![vec![true]]), false).verdict, Verdict::Ok);
    }

    #[test]
    fn a_machine_with_the_mock_alone_is_warned_of() {
        let bare = Machine::new();
        let mock = [with_peers("mock", vec![vec![true]])];
        let verdicts = |libraries: &[Library], wanted| -> Vec<Verdict> {
            check(&bare.facts, libraries, wanted).iter().map(|finding| finding.verdict).collect()
        };
        assert_eq!(verdicts(&mock, None), [Verdict::Ok, Verdict::Warning]);
        assert_eq!(verdicts(&mock, Some("mock")), [Verdict::Ok]);
        let cuda = [with_peers("cuda", vec![vec![true]]), with_peers("mock", vec![vec![true]])];
        assert_eq!(verdicts(&cuda, None), [Verdict::Ok, Verdict::Ok]);
    }
}
