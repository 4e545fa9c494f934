//! The vendors' libraries: there, of which version, or why not.

use device_ipc::{Backends, DeviceInfo, Error, Unavailable};

use super::facts::Facts;
use super::finding::Finding;
use super::{ascend, nvidia};

/// The backend that has no hardware.
const SIMULATED: &str = "mock";

/// A backend with its library, or why it cannot be used.
pub(super) struct Library {
    pub(super) name: &'static str,
    pub(super) state: Result<Usable, Unavailable>,
}

/// A backend that has devices.
pub(super) struct Usable {
    version: String,
    file: Option<String>,
    pub(super) devices: Vec<DeviceInfo>,
    /// A row for each device: which devices it reaches.
    pub(super) peers: Vec<Vec<bool>>,
}

impl Library {
    pub(super) fn usable(&self) -> Option<&Usable> {
        self.state.as_ref().ok()
    }

    pub(super) fn is_simulated(&self) -> bool {
        self.name == SIMULATED
    }
}

/// All backends, or one.
pub(super) fn of_this_machine(only: Option<&str>) -> Vec<Library> {
    let backends = Backends::registered();
    let mut libraries = Vec::new();
    for status in backends.available() {
        if only.is_some_and(|only| only != status.name) {
            continue;
        }
        let state = status.state.and_then(|devices| {
            let failed = |error: Error| Unavailable::Failed { detail: error.to_string() };
            usable(&backends, status.name, devices).map_err(failed)
        });
        libraries.push(Library { name: status.name, state });
    }
    libraries
}

fn usable(backends: &Backends, name: &str, devices: Vec<DeviceInfo>) -> Result<Usable, Error> {
    let backend = backends.named(name)?;
    let row = |from: &DeviceInfo| {
        devices.iter().map(|to| backend.peer_access(from.ordinal, to.ordinal)).collect::<Result<_, _>>()
    };
    let peers = devices.iter().map(row).collect::<Result<_, _>>()?;
    let info = backend.info();
    Ok(Usable { version: info.version.clone(), file: info.library.clone(), devices, peers })
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
    match reason {
        // Loaded, and no good: somebody put it there.
        Unavailable::StubLibrary { .. } => Finding::problem(
            check,
            reason.to_string(),
            "take the folder of stubs (stubs, devlib) out of LD_LIBRARY_PATH, and install or mount the driver",
        ),
        Unavailable::TooOld { .. } => {
            Finding::problem(check, reason.to_string(), "install the newer version")
        }
        _ if present || wanted => Finding::problem(check, reason.to_string(), change),
        Unavailable::LibraryNotFound { .. } => {
            Finding::ok(check, "not installed, and no card of the vendor is here")
        }
        _ => Finding::warning(check, reason.to_string(), change),
    }
}

fn in_use(check: &'static str, usable: &Usable) -> Finding {
    let file = usable.file.as_deref().map(|file| format!(", {file}")).unwrap_or_default();
    let found = format!("{}{file}, {} device(s)", usable.version, usable.devices.len());
    if usable.file.as_deref().is_some_and(|file| file.contains("/stubs/") || file.contains("/devlib/")) {
        let change = "take that folder out of LD_LIBRARY_PATH: what lies in it is for linking only";
        return Finding::problem(check, found, change);
    }
    Finding::ok(check, found)
}

#[cfg(test)]
pub(super) mod tests {
    use device_ipc::DeviceIdentity;

    use super::super::facts::tests::Machine;
    use super::super::finding::Verdict;
    use super::*;

    /// A library with devices that reach each other so.
    pub(in crate::doctor) fn with_peers(name: &'static str, peers: Vec<Vec<bool>>) -> Library {
        let device = |ordinal: usize| {
            DeviceInfo::new(
                (ordinal as u32).into(),
                DeviceIdentity::Uuid([ordinal as u8; 16]),
                "A card",
                1 << 30,
            )
        };
        let devices = (0..peers.len()).map(device).collect();
        Library { name, state: Ok(Usable { version: "1.0".into(), file: None, devices, peers }) }
    }

    fn without(name: &'static str, reason: Unavailable) -> Library {
        Library { name, state: Err(reason) }
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
