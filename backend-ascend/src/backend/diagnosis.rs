//! Checks of Ascend for `device-ipc doctor`: the nodes in `/dev`, the version of the driver, the page size, the variables that hide
//! devices, and the assumptions of this backend that no card of the project has confirmed.

use device_ipc_core::backend::{Diagnosis, Finding, Machine, Symptom};

use super::ascend::AscendBackend;

/// The device node that every use of a card requires.
const MANAGER: &str = "/dev/davinci_manager";

/// Device nodes that every use of a card requires (CANN's installation guide, "Mounting devices into a container").
const NODES: [&str; 3] = [MANAGER, "/dev/devmm_svm", "/dev/hisi_hdc"];

const VERSION: &str = "/usr/local/Ascend/driver/version.info";

/// The first Ascend HDK whose driver shares memory between processes (PyTorch's `memory_sharing_ipc.md`).
const MIN_MEMORY_SHARING: (u32, u32) = (25, 3);

/// The first Ascend HDK that shares events on hosts whose page size is not 4096 B (torch_npu's `AclInterface.cpp`).
const MIN_EVENT_SHARING: (u32, u32) = (26, 0);

const CARD: &str = "Ascend card";
const REPORT: &str = "send us this line: docs/guide/ascend.md, \"What to send us when it fails\"";

#[derive(Debug)]
pub(super) struct AscendDiagnosis;

impl Diagnosis for AscendDiagnosis {
    fn has_devices(&self, machine: &Machine) -> bool {
        machine.exists(MANAGER)
    }

    fn check_machine(&self, machine: &Machine, is_available: bool) -> Vec<Finding> {
        let mut findings = visible_devices(machine);
        let has_devices = self.has_devices(machine);
        if !is_available && !has_devices {
            let found = format!("not installed ({MANAGER} does not exist)");
            findings.push(Finding::ok("Ascend driver", found));
            return findings;
        }
        findings.extend([driver(machine), page_size(machine)]);
        findings.extend(has_devices.then(|| nodes(machine)));
        findings
    }

    fn probe_devices(&self) -> Vec<Finding> {
        let observed = AscendBackend::load()
            .map_err(|reason| reason.to_string())
            .and_then(|backend| backend.observe().map_err(|error| error.to_string()));
        match observed {
            Ok(observed) => observed
                .into_iter()
                .map(|one| {
                    let found = format!("{}: {}", one.topic, one.result);
                    if one.as_assumed {
                        Finding::ok(CARD, found)
                    } else {
                        Finding::warning(CARD, found, REPORT)
                    }
                })
                .collect(),
            Err(why) => vec![Finding::problem(CARD, why, REPORT)],
        }
    }

    fn remedy(&self, symptom: Symptom<'_>) -> Option<&'static str> {
        matches!(symptom, Symptom::LibraryFails).then_some("npu-smi info")
    }
}

fn nodes(machine: &Machine) -> Finding {
    let check = "Ascend devices";
    let missing: Vec<&str> = NODES.into_iter().filter(|node| !machine.exists(node)).collect();
    let cards = machine.names("/dev").into_iter().filter(|name| {
        name.strip_prefix("davinci")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    });
    let cards = cards.count();
    if !missing.is_empty() || cards == 0 {
        let missing = if missing.is_empty() { "/dev/davinci0".into() } else { missing.join(", ") };
        let change = "start the container with the Ascend Docker Runtime, or with --device for each node";
        return Finding::problem(check, format!("not found: {missing}"), change);
    }
    Finding::ok(check, format!("{cards} in /dev"))
}

fn driver(machine: &Machine) -> Finding {
    let check = "Ascend driver";
    match version(machine) {
        None => Finding::warning(
            check,
            format!(
                "unknown version: {VERSION} does not exist or contains no version; Ascend HDK 25.3.RC1 is required"
            ),
            "in a container: -v /usr/local/Ascend/driver:/usr/local/Ascend/driver; or check the version with npu-smi info",
        ),
        Some((number, whole)) if number < MIN_MEMORY_SHARING => Finding::problem(
            check,
            format!("{whole} does not support sharing memory between processes"),
            "install Ascend HDK 25.3.RC1 or newer (driver and firmware)",
        ),
        Some((_, whole)) => Finding::ok(check, whole),
    }
}

fn page_size(machine: &Machine) -> Finding {
    let check = "page size";
    let bytes = machine.page_bytes();
    if bytes == 4096 {
        return Finding::ok(check, "4096 B");
    }
    match version(machine) {
        Some((number, whole)) if number >= MIN_EVENT_SHARING => {
            Finding::ok(check, format!("{bytes} B, with which driver {whole} can share events"))
        }
        _ => Finding::warning(
            check,
            format!(
                "{bytes} B, with which this driver cannot share events: ready_on and mappings on a stream wait on the host"
            ),
            "install Ascend HDK 26.0.RC1 or newer, or boot a kernel with a page size of 4096 B",
        ),
    }
}

/// Parses a line such as `Version=25.3.rc1`.
fn version(machine: &Machine) -> Option<((u32, u32), String)> {
    let text = machine.text(VERSION)?;
    let whole = text.lines().find_map(|line| line.trim().strip_prefix("Version="))?.trim();
    let mut numbers = whole.split('.');
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some(((major, minor), whole.to_owned()))
}

/// The variable that the runtime reads in each process.
const VISIBLE: &str = "ASCEND_RT_VISIBLE_DEVICES";
/// The variable that the container runtime reads at the start of the container.
const CONTAINER: &str = "ASCEND_VISIBLE_DEVICES";

fn visible_devices(machine: &Machine) -> Vec<Finding> {
    let set: Vec<Finding> = [
        machine.variable(VISIBLE).map(visible_to_process),
        machine.variable(CONTAINER).map(visible_to_container),
    ]
    .into_iter()
    .flatten()
    .collect();
    if set.is_empty() {
        let found = format!("no variable hides devices (not set: {VISIBLE}, {CONTAINER})");
        return vec![Finding::ok("visible devices of ascend", found)];
    }
    set
}

/// Checks the list of ACL, which ignores everything from the first entry that is not in ascending order (ACL manual,
/// "aclrtSetDevice").
fn visible_to_process(value: &str) -> Finding {
    let numbers: Option<Vec<u32>> = value.split(',').map(|entry| entry.trim().parse().ok()).collect();
    let change = format!("unset {VISIBLE}, or list the devices in ascending order: {VISIBLE}=0,1");
    let Some(numbers) = numbers else {
        let found = format!("{value:?} is not a list of numbers, so it hides devices");
        return Finding::problem(VISIBLE, found, change);
    };
    if !numbers.is_sorted_by(|a, b| a < b) {
        let found = format!("{value:?} is not in ascending order, so the runtime ignores part of it");
        return Finding::warning(VISIBLE, found, change);
    }
    let found = format!(
        "{value:?}; ordinals may differ between processes, because descriptors identify devices by UUID"
    );
    Finding::ok(VISIBLE, found)
}

fn visible_to_container(value: &str) -> Finding {
    if matches!(value.trim(), "" | "void" | "none") {
        return Finding::warning(
            CONTAINER,
            format!("{value:?}: the container was started without devices"),
            format!("start it with devices, for example -e {CONTAINER}=0,1"),
        );
    }
    Finding::ok(CONTAINER, format!("{value:?}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use device_ipc_core::backend::Verdict;

    use super::*;

    /// A machine with these files, and the directory that they are in.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        for (path, text) in files {
            let path = machine.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (root, machine)
    }

    fn driver_file(version: &str) -> String {
        format!("Version={version}\nascendhal_version=7.35.19\n")
    }

    #[test]
    fn machine_without_cards_has_no_finding_of_the_driver() {
        let (_root, bare) = machine(&[]);
        let findings = AscendDiagnosis.check_machine(&bare, false);
        assert!(findings.iter().all(|finding| finding.verdict == Verdict::Ok), "{findings:?}");
        assert_eq!(findings.len(), 2);
        let (_root, cards) = machine(&[(VERSION, &driver_file("25.3.rc1")), (MANAGER, "")]);
        assert!(AscendDiagnosis.has_devices(&cards));
        assert_eq!(AscendDiagnosis.check_machine(&cards, false).len(), 4);
    }

    #[test]
    fn driver_version_determines_the_verdict() {
        assert_eq!(driver(&machine(&[]).1).verdict, Verdict::Warning);
        for (version, verdict) in [
            ("new", Verdict::Warning),
            ("24.1.0", Verdict::Problem),
            ("25.2.3", Verdict::Problem),
            ("25.3.rc1", Verdict::Ok),
            ("26.0.rc1", Verdict::Ok),
        ] {
            let (_root, machine) = machine(&[(VERSION, &driver_file(version))]);
            let finding = driver(&machine);
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(verdict == Verdict::Warning || finding.found.contains(version), "{finding:?}");
        }
    }

    #[test]
    fn large_pages_require_a_newer_driver() {
        let (_root, small) = machine(&[(VERSION, &driver_file("25.3.rc1"))]);
        assert_eq!(page_size(&small).verdict, Verdict::Ok);
        let finding = page_size(&small.with_page_bytes(65536));
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("65536"), "{finding:?}");
        let (_root, newer) = machine(&[(VERSION, &driver_file("26.0.rc1"))]);
        assert_eq!(page_size(&newer.with_page_bytes(65536)).verdict, Verdict::Ok);
    }

    #[test]
    fn missing_device_nodes_are_named() {
        let (_root, half) = machine(&[(MANAGER, ""), ("/dev/davinci0", "")]);
        let finding = nodes(&half);
        assert_eq!(
            (finding.verdict, finding.found.as_str()),
            (Verdict::Problem, "not found: /dev/devmm_svm, /dev/hisi_hdc")
        );
        let whole = [(MANAGER, ""), ("/dev/davinci0", ""), ("/dev/devmm_svm", ""), ("/dev/hisi_hdc", "")];
        let (_root, whole) = machine(&whole);
        assert_eq!(nodes(&whole).found, "1 in /dev");
    }

    #[test]
    fn visibility_variables_are_parsed_as_the_vendor_does() {
        for (name, value, verdict) in [
            (VISIBLE, "1,0", Verdict::Warning),
            (VISIBLE, "", Verdict::Problem),
            (VISIBLE, "0,2", Verdict::Ok),
            (CONTAINER, "void", Verdict::Warning),
            (CONTAINER, "0", Verdict::Ok),
        ] {
            let (_root, machine) = machine(&[]);
            let findings = visible_devices(&machine.with_variable(name, value));
            assert_eq!(findings.len(), 1);
            assert_eq!((findings[0].check.as_ref(), findings[0].verdict), (name, verdict), "{value:?}");
        }
    }
}
