//! Checks of Ascend: the nodes in `/dev`, the version of the driver, and the page size.

use super::facts::Facts;
use super::finding::Finding;
use super::libraries::Library;

/// Device nodes that every use of a card requires (CANN's installation guide, "Mounting devices into a container").
const NODES: [&str; 3] = [super::facts::ASCEND_MANAGER, "/dev/devmm_svm", "/dev/hisi_hdc"];

const VERSION: &str = "/usr/local/Ascend/driver/version.info";

/// The first Ascend HDK whose driver shares memory between processes (PyTorch's `memory_sharing_ipc.md`).
const MIN_MEMORY_SHARING: (u32, u32) = (25, 3);

/// The first Ascend HDK that shares events on hosts whose page size is not 4096 B (torch_npu's `AclInterface.cpp`).
const MIN_EVENT_SHARING: (u32, u32) = (26, 0);

pub(super) fn check(facts: &Facts, libraries: &[Library]) -> Vec<Finding> {
    let available = libraries.iter().any(|library| library.name == "ascend" && library.available().is_some());
    if !available && !facts.has_ascend_device() {
        return vec![Finding::ok("Ascend driver", "not installed (/dev/davinci_manager does not exist)")];
    }
    let mut findings = vec![driver(facts), page_size(facts)];
    if facts.has_ascend_device() {
        findings.push(nodes(facts));
    }
    findings
}

fn nodes(facts: &Facts) -> Finding {
    let check = "Ascend devices";
    let missing: Vec<&str> = NODES.into_iter().filter(|node| !facts.exists(node)).collect();
    let cards = facts.names("/dev").into_iter().filter(|name| {
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

fn driver(facts: &Facts) -> Finding {
    let check = "Ascend driver";
    match version(facts) {
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

fn page_size(facts: &Facts) -> Finding {
    let check = "page size";
    let bytes = facts.page_bytes;
    if bytes == 4096 {
        return Finding::ok(check, "4096 B");
    }
    match version(facts) {
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
fn version(facts: &Facts) -> Option<((u32, u32), String)> {
    let text = facts.text(VERSION)?;
    let whole = text.lines().find_map(|line| line.trim().strip_prefix("Version="))?.trim();
    let mut numbers = whole.split('.');
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some(((major, minor), whole.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::Machine;
    use super::super::finding::Verdict;
    use super::*;

    fn with_driver(version: &str) -> Machine {
        Machine::new().with(VERSION, &format!("Version={version}\nascendhal_version=7.35.19\n"))
    }

    #[test]
    fn machine_without_cards_has_one_finding() {
        let findings = check(&Machine::new().facts, &[]);
        assert!(findings.len() == 1 && findings[0].verdict == Verdict::Ok);
        assert_eq!(check(&with_driver("25.3.rc1").with("/dev/davinci_manager", "").facts, &[]).len(), 3);
    }

    #[test]
    fn driver_version_determines_the_verdict() {
        assert_eq!(driver(&Machine::new().facts).verdict, Verdict::Warning);
        assert_eq!(driver(&with_driver("new").facts).verdict, Verdict::Warning);
        for (version, verdict) in [
            ("24.1.0", Verdict::Problem),
            ("25.2.3", Verdict::Problem),
            ("25.3.rc1", Verdict::Ok),
            ("26.0.rc1", Verdict::Ok),
        ] {
            let finding = driver(&with_driver(version).facts);
            assert!(finding.verdict == verdict && finding.found.contains(version), "{finding}");
        }
    }

    #[test]
    fn large_pages_require_a_newer_driver() {
        let mut machine = with_driver("25.3.rc1");
        assert_eq!(page_size(&machine.facts).verdict, Verdict::Ok);
        machine.facts.page_bytes = 65536;
        let finding = page_size(&machine.facts);
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("65536"), "{finding}");
        let newer = machine.with(VERSION, "Version=26.0.rc1\n");
        assert_eq!(page_size(&newer.facts).verdict, Verdict::Ok);
    }

    #[test]
    fn missing_device_nodes_are_named() {
        let machine = Machine::new().with("/dev/davinci_manager", "").with("/dev/davinci0", "");
        let finding = nodes(&machine.facts);
        assert_eq!(
            (finding.verdict, finding.found.as_str()),
            (Verdict::Problem, "not found: /dev/devmm_svm, /dev/hisi_hdc")
        );
        let machine = machine.with("/dev/devmm_svm", "").with("/dev/hisi_hdc", "");
        assert_eq!(nodes(&machine.facts).found, "1 in /dev");
    }
}
