//! Checks of the vendor libraries. Each library is loaded in a child process.

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use device_ipc::Error;
use device_ipc::backend::{Backends, Diagnosis, Finding, Registration, Symptom, Unavailable};
use serde::{Deserialize, Serialize};

use super::facts::Facts;
use super::process;
use crate::output::line;

/// Arguments of the child process that loads a library and prints its state as JSON.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    backend: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    line(serde_json::to_string(&probe(&arguments.backend))?)
}

/// A backend and the state of its library.
pub(super) struct Library {
    registration: Registration,
    pub(super) state: Result<AvailableLibrary, UnavailableReason>,
}

/// An available library with at least one device.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AvailableLibrary {
    version: String,
    file: Option<String>,
    /// Row `i`, column `j`: whether device `i` can access memory of device `j`.
    pub(super) peers: Vec<Vec<bool>>,
    /// The names of the kinds of memory whose handles identify a process by its process id.
    pub(super) kinds_with_process_ids: Vec<String>,
    /// The findings of the backend itself.
    pub(super) findings: Vec<Finding>,
}

/// The reason why a backend is unavailable.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct UnavailableReason {
    kind: ReasonKind,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum ReasonKind {
    NotFound,
    TooOld,
    Stub,
    /// The child process that loaded it crashed or timed out.
    Unhealthy,
    Other,
}

impl From<Unavailable> for UnavailableReason {
    fn from(reason: Unavailable) -> Self {
        let kind = match &reason {
            Unavailable::LibraryNotFound { .. } => ReasonKind::NotFound,
            Unavailable::TooOld { .. } => ReasonKind::TooOld,
            Unavailable::StubLibrary { .. } => ReasonKind::Stub,
            _ => ReasonKind::Other,
        };
        Self { kind, text: reason.to_string() }
    }
}

impl fmt::Display for UnavailableReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Library {
    pub(super) fn available(&self) -> Option<&AvailableLibrary> {
        self.state.as_ref().ok()
    }

    pub(super) const fn name(&self) -> &'static str {
        self.registration.name()
    }

    pub(super) fn is_simulated(&self) -> bool {
        self.registration.is_simulated()
    }

    pub(super) const fn diagnosis(&self) -> Option<&'static dyn Diagnosis> {
        self.registration.diagnosis()
    }

    /// Returns an action, with the vendor's own remedy for the symptom behind it.
    pub(super) fn with_remedy(&self, action: &str, symptom: Symptom<'_>) -> String {
        match self.diagnosis().and_then(|diagnosis| diagnosis.remedy(symptom)) {
            Some(remedy) => format!("{action}; {remedy}"),
            None => action.to_owned(),
        }
    }
}

/// Probes all backends, or one. The timeout applies to each backend.
pub(super) fn of_this_machine(only: Option<&str>, timeout: Duration) -> Vec<Library> {
    let backends = Backends::registered();
    let selected = backends.registrations().iter().filter(|one| only.is_none_or(|only| only == one.name()));
    selected.map(|one| Library { registration: *one, state: probe_in_child(one.name(), timeout) }).collect()
}

/// Loads the library in a child process.
fn probe_in_child(name: &str, timeout: Duration) -> Result<AvailableLibrary, UnavailableReason> {
    let unhealthy = |text| UnavailableReason { kind: ReasonKind::Unhealthy, text };
    let printed = process::run(&["__doctor-library", name], timeout).map_err(|why| {
        unhealthy(format!("loading the library and listing its devices in a child process failed: {why}"))
    })?;
    // A vendor library may print additional lines.
    let state = printed.lines().last().and_then(|last| serde_json::from_str(last).ok());
    state.unwrap_or_else(|| {
        Err(unhealthy("the child process that loads the library exited without a result".into()))
    })
}

/// Loads the library in this process.
fn probe(name: &str) -> Result<AvailableLibrary, UnavailableReason> {
    let other = |error: Error| match error {
        Error::BackendUnavailable { reason, .. } => UnavailableReason::from(reason),
        error => UnavailableReason { kind: ReasonKind::Other, text: error.to_string() },
    };
    let backend = Backends::registered().named(name).map_err(other)?;
    let devices = backend.devices().map_err(other)?;
    if devices.is_empty() {
        return Err(Unavailable::NoDevice { detail: "the backend lists no devices".into() }.into());
    }
    let row = |from| devices.iter().map(|to| backend.peer_access(from, to.ordinal)).collect::<Result<_, _>>();
    let peers = devices.iter().map(|from| row(from.ordinal)).collect::<Result<_, _>>().map_err(other)?;
    let kinds = backend.handle_kinds();
    let kinds_with_process_ids =
        kinds.iter().filter(|kind| !kind.across_pid_namespaces).map(|kind| kind.name.to_owned()).collect();
    let registered = Backends::registered();
    let diagnosis =
        registered.registrations().iter().find(|one| one.name() == name).and_then(Registration::diagnosis);
    let findings = diagnosis.map(|diagnosis| diagnosis.check_backend(&*backend)).unwrap_or_default();
    let info = backend.info();
    let (version, file) = (info.version.clone(), info.library.clone());
    Ok(AvailableLibrary { version, file, peers, kinds_with_process_ids, findings })
}

pub(super) fn check(facts: &Facts, libraries: &[Library], selected: Option<&str>) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        libraries.iter().map(|library| one(facts, library, selected.is_some())).collect();
    let accelerated =
        libraries.iter().any(|library| library.available().is_some() && !library.is_simulated());
    if selected.is_none() && !accelerated {
        findings.push(Finding::warning(
            "accelerator",
            "no accelerator is available; only simulated devices can share memory",
            "no action on a machine without an accelerator; otherwise see the reasons above",
        ));
    }
    findings
}

fn one(facts: &Facts, library: &Library, selected: bool) -> Finding {
    let name = library.name();
    let check = if library.is_simulated() { name.to_owned() } else { format!("library of {name}") };
    let present = library.diagnosis().is_some_and(|diagnosis| diagnosis.has_devices(&facts.machine));
    let reason = match &library.state {
        Ok(available) => return in_use(check, available),
        Err(reason) => reason,
    };
    let change = "fix the reported cause, then verify with: device-ipc devices";
    let text = reason.to_string();
    match reason.kind {
        // The library exists, but cannot work, so its absence is not the cause.
        ReasonKind::Stub => Finding::problem(
            check,
            text,
            "remove the directory of stub libraries (stubs, devlib) from LD_LIBRARY_PATH, and install or mount the driver",
        ),
        ReasonKind::TooOld => Finding::problem(check, text, "install the newer version"),
        ReasonKind::Unhealthy => Finding::problem(
            check,
            text,
            format!(
                "{}; then verify with: device-ipc devices",
                library.with_remedy("check the errors of the driver: dmesg", Symptom::LibraryFails)
            ),
        ),
        _ if present || selected => Finding::problem(check, text, change),
        ReasonKind::NotFound => Finding::ok(check, "not installed, and no card of this vendor was found"),
        ReasonKind::Other => Finding::warning(check, text, change),
    }
}

fn in_use(check: String, library: &AvailableLibrary) -> Finding {
    let file = library.file.as_deref().map(|file| format!(", {file}")).unwrap_or_default();
    let found = format!("{}{file}, {} device(s)", library.version, library.peers.len());
    if library.file.as_deref().is_some_and(|file| file.contains("/stubs/") || file.contains("/devlib/")) {
        let change = "remove that directory from LD_LIBRARY_PATH: its libraries are for linking only";
        return Finding::problem(check, found, change);
    }
    Finding::ok(check, found)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::facts::tests::TestMachine;
    use super::*;
    use device_ipc::backend::Verdict;

    /// Creates an available library with this peer access.
    pub(in crate::doctor) fn with_peers(name: &str, peers: Vec<Vec<bool>>) -> Library {
        let (kinds_with_process_ids, findings) = (Vec::new(), Vec::new());
        let version = "1.0".into();
        let state = Ok(AvailableLibrary { version, file: None, peers, kinds_with_process_ids, findings });
        Library { registration: registered(name), state }
    }

    fn registered(name: &str) -> Registration {
        let backends = Backends::registered();
        *backends.registrations().iter().find(|one| one.name() == name).unwrap()
    }

    /// Creates an unavailable library.
    pub(in crate::doctor) fn without(name: &str, reason: Unavailable) -> Library {
        Library { registration: registered(name), state: Err(reason.into()) }
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
    fn missing_library_is_a_problem_if_cards_exist_or_selected() {
        let library = without("cuda", not_found());
        let bare = TestMachine::new();
        assert_eq!(one(&bare.facts, &library, false).verdict, Verdict::Ok);
        assert_eq!(one(&bare.facts, &library, true).verdict, Verdict::Problem);
        let machine = TestMachine::new().with("/dev/nvidiactl", "");
        let finding = one(&machine.facts, &library, false);
        assert!(finding.verdict == Verdict::Problem && finding.found.contains("Install it"), "{finding:?}");
        let machine = TestMachine::new().with("/dev/davinci_manager", "");
        assert_eq!(one(&machine.facts, &without("ascend", not_found()), false).verdict, Verdict::Problem);
    }

    #[test]
    fn unusable_library_is_reported() {
        let bare = TestMachine::new();
        let finding = one(&bare.facts, &without("ascend", stub()), false);
        assert!(finding.verdict == Verdict::Problem && finding.found.contains("stub library"), "{finding:?}");
        let old = Unavailable::TooOld {
            library: "libcuda.so.1".into(),
            missing: "cuMemPoolCreate".into(),
            needed: "470".into(),
        };
        assert_eq!(one(&bare.facts, &without("cuda", old), false).verdict, Verdict::Problem);
        let hangs = UnavailableReason { kind: ReasonKind::Unhealthy, text: "timed out after 90 s".into() };
        let hangs = Library { registration: registered("cuda"), state: Err(hangs) };
        assert_eq!(one(&bare.facts, &hangs, false).verdict, Verdict::Problem);
        let none = Unavailable::NoDevice { detail: "none".into() };
        assert_eq!(one(&bare.facts, &without("cuda", none), false).verdict, Verdict::Warning);
        let mut stubs = with_peers("cuda", vec![vec![true]]);
        let Ok(available) = &mut stubs.state else { unreachable!() };
        available.file = Some("/usr/local/cuda/lib64/stubs/libcuda.so".into());
        assert_eq!(one(&bare.facts, &stubs, false).verdict, Verdict::Problem);
        assert_eq!(one(&bare.facts, &with_peers("cuda", vec![vec![true]]), false).verdict, Verdict::Ok);
    }

    #[test]
    fn machine_with_only_the_mock_is_a_warning() {
        let bare = TestMachine::new();
        let mock = [with_peers("mock", vec![vec![true]])];
        let verdicts = |libraries: &[Library], selected| -> Vec<Verdict> {
            check(&bare.facts, libraries, selected).iter().map(|finding| finding.verdict).collect()
        };
        assert_eq!(verdicts(&mock, None), [Verdict::Ok, Verdict::Warning]);
        assert_eq!(verdicts(&mock, Some("mock")), [Verdict::Ok]);
        let cuda = [with_peers("cuda", vec![vec![true]]), with_peers("mock", vec![vec![true]])];
        assert_eq!(verdicts(&cuda, None), [Verdict::Ok, Verdict::Ok]);
    }
}
