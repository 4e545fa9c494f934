//! Checks of device visibility and peer access.

use device_ipc::{BACKEND_VARIABLE, Backends};

use super::facts::Facts;
use super::finding::Finding;
use super::libraries::Library;

/// Checks which devices can access each other's memory. `None` for a backend without devices.
pub(super) fn peer_access(library: &Library) -> Option<Finding> {
    let peers = &library.available()?.peers;
    let check = match library.name {
        "cuda" => "peer access of cuda",
        "ascend" => "peer access of ascend",
        "mock" => "peer access of the mock",
        _ => "peer access",
    };
    if peers.len() < 2 {
        return Some(Finding::ok(check, "not required with one device"));
    }
    let unreachable: Vec<String> = peers
        .iter()
        .enumerate()
        .flat_map(|(from, row)| row.iter().enumerate().map(move |(to, reaches)| (from, to, *reaches)))
        .filter(|(from, to, reaches)| from != to && !reaches)
        .map(|(from, to, _)| format!("{from} -> {to}"))
        .collect();
    if unreachable.is_empty() {
        return Some(Finding::ok(
            check,
            format!("each of the {} devices can access the memory of every other device", peers.len()),
        ));
    }
    Some(Finding::warning(
        check,
        format!("no peer access between devices: {}", unreachable.join(", ")),
        "open on the home device and copy (omit --device); on the host, check nvidia-smi topo -p2p r and disable ACS and IOMMU",
    ))
}

/// Checks the variable that names the backend of programs. `libraries` may lack backends that are not to be checked.
pub(super) fn selection(facts: &Facts, libraries: &[Library]) -> Finding {
    let variable = facts.variable(BACKEND_VARIABLE).filter(|name| !name.is_empty());
    let Some(name) = variable else {
        return Finding::ok(BACKEND_VARIABLE, "not set: programs use the first backend that has a device");
    };
    let backends: Vec<&str> = Backends::registered().names().collect();
    if !backends.contains(&name) {
        let change = format!("unset {BACKEND_VARIABLE}, or set it to one of: {}", backends.join(", "));
        return Finding::problem(BACKEND_VARIABLE, format!("{name:?} is not a backend"), change);
    }
    if libraries.iter().any(|library| library.name == name && library.available().is_none()) {
        return Finding::problem(
            BACKEND_VARIABLE,
            format!("{name:?} is unavailable, and programs that do not name a backend use no other"),
            format!("unset {BACKEND_VARIABLE}, or remove the cause that is stated for {name}"),
        );
    }
    Finding::ok(BACKEND_VARIABLE, format!("{name:?}: programs that do not name a backend use this one"))
}

/// A variable that hides devices: the backend, the name, and the check of its value.
type Variable = (&'static str, &'static str, fn(&'static str, &str) -> Finding);

const VARIABLES: [Variable; 4] = [
    ("cuda", "CUDA_VISIBLE_DEVICES", cuda),
    ("cuda", "NVIDIA_VISIBLE_DEVICES", container),
    ("ascend", "ASCEND_RT_VISIBLE_DEVICES", ascend),
    ("ascend", "ASCEND_VISIBLE_DEVICES", container),
];

/// Checks the variables that hide devices of the selected backends.
pub(super) fn visible(facts: &Facts, concerns: impl Fn(&str) -> bool) -> Vec<Finding> {
    let variables = VARIABLES.iter().filter(|(backend, ..)| concerns(backend));
    let set: Vec<Finding> = variables
        .clone()
        .filter_map(|(_, name, look)| facts.variable(name).map(|value| look(name, value)))
        .collect();
    let names: Vec<&str> = variables.map(|(_, name, _)| *name).collect();
    if set.is_empty() && !names.is_empty() {
        let found = format!("no variable hides devices (not set: {})", names.join(", "));
        return vec![Finding::ok("visible devices", found)];
    }
    set
}

fn numbers_differ(value: &str) -> String {
    format!("{value:?}; ordinals may differ between processes, because descriptors identify devices by UUID")
}

/// Checks a value for CUDA, whose list ends at the first entry that is not a device (CUDA programming guide, "CUDA
/// Environment Variables").
fn cuda(name: &'static str, value: &str) -> Finding {
    let entries: Vec<&str> = value.split(',').map(str::trim).collect();
    let change = format!("unset {name}, or list the devices: {name}=0,1");
    if entries[0].is_empty() || entries[0] == "-1" || entries[0] == "NoDevFiles" {
        return Finding::problem(name, format!("{value:?} hides every GPU"), change);
    }
    let twice = entries.iter().enumerate().any(|(index, entry)| entries[..index].contains(entry));
    if twice {
        return Finding::problem(name, format!("{value:?} lists a device twice, so CUDA sees none"), change);
    }
    if entries.iter().any(|entry| entry.is_empty() || *entry == "-1") {
        let found = format!("{value:?}: CUDA ignores everything from the first entry that is not a device");
        return Finding::warning(name, found, change);
    }
    Finding::ok(name, numbers_differ(value))
}

/// Checks a value for ACL, which ignores everything from the first entry that is not in ascending order (ACL manual,
/// "aclrtSetDevice").
fn ascend(name: &'static str, value: &str) -> Finding {
    let numbers: Option<Vec<u32>> = value.split(',').map(|entry| entry.trim().parse().ok()).collect();
    let change = format!("unset {name}, or list the devices in ascending order: {name}=0,1");
    let Some(numbers) = numbers else {
        return Finding::problem(
            name,
            format!("{value:?} is not a list of numbers, so it hides devices"),
            change,
        );
    };
    if !numbers.is_sorted_by(|a, b| a < b) {
        let found = format!("{value:?} is not in ascending order, so the runtime ignores part of it");
        return Finding::warning(name, found, change);
    }
    Finding::ok(name, numbers_differ(value))
}

/// Checks a variable that the container runtime reads at the start of the container.
fn container(name: &'static str, value: &str) -> Finding {
    if matches!(value.trim(), "" | "void" | "none") {
        let found = format!("{value:?}: the container was started without devices");
        return Finding::warning(
            name,
            found,
            format!("start it with devices, for example -e {name}=0,1 or --gpus all"),
        );
    }
    Finding::ok(name, format!("{value:?}"))
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::Machine;
    use super::super::finding::Verdict;
    use super::super::libraries::tests::{with_peers, without};
    use super::*;
    use device_ipc::Unavailable;

    #[test]
    fn devices_without_peer_access_are_listed() {
        let verdict = |peers| peer_access(&with_peers("cuda", peers)).unwrap();
        assert_eq!(verdict(vec![vec![true]]).verdict, Verdict::Ok);
        assert_eq!(verdict(vec![vec![true, true], vec![true, true]]).verdict, Verdict::Ok);
        let unreachable = verdict(vec![vec![true, true], vec![false, true]]);
        assert!(
            unreachable.verdict == Verdict::Warning && unreachable.found.ends_with("devices: 1 -> 0"),
            "{unreachable}"
        );
    }

    #[test]
    fn backend_variable_names_an_available_backend() {
        let libraries = [
            with_peers("mock", vec![vec![true]]),
            without("cuda", Unavailable::NoDevice { detail: "none".into() }),
        ];
        let verdict = |value: Option<&str>| {
            let machine = Machine::new();
            let machine = match value {
                Some(value) => machine.with_variable(BACKEND_VARIABLE, value),
                None => machine,
            };
            selection(&machine.facts, &libraries)
        };
        assert_eq!(verdict(None).verdict, Verdict::Ok);
        assert_eq!(verdict(Some("")).verdict, Verdict::Ok);
        assert_eq!(verdict(Some("mock")).verdict, Verdict::Ok);
        // Not among the checked ones.
        assert_eq!(verdict(Some("ascend")).verdict, Verdict::Ok);
        let unavailable = verdict(Some("cuda"));
        assert!(
            unavailable.verdict == Verdict::Problem && unavailable.found.contains("unavailable"),
            "{unavailable}"
        );
        let unknown = verdict(Some("nvidia"));
        let change = unknown.change.as_deref().unwrap_or_default();
        assert!(unknown.verdict == Verdict::Problem && change.contains("cuda, ascend, mock"), "{unknown}");
    }

    #[test]
    fn visibility_variables_are_parsed_as_vendors_do() {
        for (name, value, verdict) in [
            ("CUDA_VISIBLE_DEVICES", "", Verdict::Problem),
            ("CUDA_VISIBLE_DEVICES", "-1", Verdict::Problem),
            ("CUDA_VISIBLE_DEVICES", "0,0", Verdict::Problem),
            ("CUDA_VISIBLE_DEVICES", "1,-1,0", Verdict::Warning),
            ("CUDA_VISIBLE_DEVICES", "1,0", Verdict::Ok),
            ("CUDA_VISIBLE_DEVICES", "GPU-1234", Verdict::Ok),
            ("ASCEND_RT_VISIBLE_DEVICES", "1,0", Verdict::Warning),
            ("ASCEND_RT_VISIBLE_DEVICES", "", Verdict::Problem),
            ("ASCEND_RT_VISIBLE_DEVICES", "0,2", Verdict::Ok),
            ("NVIDIA_VISIBLE_DEVICES", "void", Verdict::Warning),
            ("NVIDIA_VISIBLE_DEVICES", "all", Verdict::Ok),
        ] {
            let findings = visible(&Machine::new().with_variable(name, value).facts, |_| true);
            assert_eq!(findings.len(), 1);
            assert_eq!((findings[0].check, findings[0].verdict), (name, verdict), "{value:?}");
        }
        assert_eq!(visible(&Machine::new().facts, |_| true)[0].verdict, Verdict::Ok);
        let hidden = Machine::new().with_variable("CUDA_VISIBLE_DEVICES", "-1");
        assert_eq!(visible(&hidden.facts, |name| name == "mock").len(), 0);
    }
}
