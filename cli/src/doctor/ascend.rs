//! What Huawei's files tell: the nodes in `/dev`, the driver's version, and what the page size means for it.

use super::facts::Facts;
use super::finding::Finding;
use super::libraries::Library;

/// Without these no card of theirs can be used (CANN's installation guide, "Mounting devices into a container").
const NODES: [&str; 3] = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"];

const VERSION: &str = "/usr/local/Ascend/driver/version.info";

/// The first Ascend HDK whose driver shares memory between processes (PyTorch's `memory_sharing_ipc.md`).
const SHARES: (u32, u32) = (25, 3);

/// The first one that shares events where the pages of the host are not of 4096 bytes (torch_npu's `AclInterface.cpp`).
const SHARES_EVENTS: (u32, u32) = (26, 0);

pub(super) fn check(facts: &Facts, libraries: &[Library]) -> Vec<Finding> {
    let usable = libraries.iter().any(|library| library.name == "ascend" && library.usable().is_some());
    if !usable && !is_there(facts) {
        return vec![Finding::ok("Ascend driver", "none here (/dev/davinci_manager is not there)")];
    }
    let mut findings = vec![driver(facts), page_size(facts)];
    if is_there(facts) {
        findings.push(nodes(facts));
    }
    findings
}

pub(super) fn is_there(facts: &Facts) -> bool {
    facts.exists(NODES[0])
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
        let change = "start the container by the Ascend Docker Runtime, or with --device for each of them";
        return Finding::problem(check, format!("{missing} is missing"), change);
    }
    Finding::ok(check, format!("{cards} in /dev"))
}

fn driver(facts: &Facts) -> Finding {
    let check = "Ascend driver";
    match version(facts) {
        None => Finding::warning(
            check,
            format!("{VERSION} is not there or tells no version; Ascend HDK 25.3.RC1 is needed"),
            "in a container: -v /usr/local/Ascend/driver:/usr/local/Ascend/driver; or ask: npu-smi info",
        ),
        Some((number, whole)) if number < SHARES => Finding::problem(
            check,
            format!("{whole}, which does not share memory between processes"),
            "install Ascend HDK 25.3.RC1 or newer (driver and firmware)",
        ),
        Some((_, whole)) => Finding::ok(check, whole),
    }
}

fn page_size(facts: &Facts) -> Finding {
    let check = "page size";
    let bytes = facts.page_bytes;
    if bytes == 4096 {
        return Finding::ok(check, "4096 bytes");
    }
    match version(facts) {
        Some((number, whole)) if number >= SHARES_EVENTS => {
            Finding::ok(check, format!("{bytes} bytes; driver {whole} shares events nevertheless"))
        }
        _ => Finding::warning(
            check,
            format!(
                "{bytes} bytes: this driver shares no events, so ready_on and mappings on a stream wait on the host"
            ),
            "install Ascend HDK 26.0.RC1 or newer, or boot a kernel with pages of 4096 bytes",
        ),
    }
}

/// `Version=25.3.rc1`.
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
    fn nothing_is_said_of_cards_that_are_not_there() {
        let findings = check(&Machine::new().facts, &[]);
        assert!(findings.len() == 1 && findings[0].verdict == Verdict::Ok);
        assert_eq!(check(&with_driver("25.3.rc1").with("/dev/davinci_manager", "").facts, &[]).len(), 3);
    }

    #[test]
    fn the_driver_is_unknown_old_or_good() {
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
    fn pages_of_another_size_need_a_newer_driver() {
        let mut machine = with_driver("25.3.rc1");
        assert_eq!(page_size(&machine.facts).verdict, Verdict::Ok);
        machine.facts.page_bytes = 65536;
        let finding = page_size(&machine.facts);
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("65536"), "{finding}");
        let newer = machine.with(VERSION, "Version=26.0.rc1\n");
        assert_eq!(page_size(&newer.facts).verdict, Verdict::Ok);
    }

    #[test]
    fn nodes_that_a_container_lacks_are_named() {
        let machine = Machine::new().with("/dev/davinci_manager", "").with("/dev/davinci0", "");
        let finding = nodes(&machine.facts);
        assert_eq!(
            (finding.verdict, finding.found.as_str()),
            (Verdict::Problem, "/dev/devmm_svm, /dev/hisi_hdc is missing")
        );
        let machine = machine.with("/dev/devmm_svm", "").with("/dev/hisi_hdc", "");
        assert_eq!(nodes(&machine.facts).found, "1 in /dev");
    }
}
