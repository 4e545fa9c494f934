//! Checks of the selected backend and of peer access.

use device_ipc::backend::{BACKEND_VARIABLE, Backends, Finding, Registration, Symptom};

use super::facts::Facts;
use super::libraries::Library;

/// Checks which devices can access each other's memory. `None` for a backend without devices.
pub(super) fn peer_access(library: &Library) -> Option<Finding> {
    let peers = &library.available()?.peers;
    let check = format!("peer access of {}", library.name());
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
        library.with_remedy("open on the home device and copy (omit --device)", Symptom::NoPeerAccess),
    ))
}

/// Checks the variable that names the backend of programs. `libraries` may lack backends that are not to be checked.
pub(super) fn selection(facts: &Facts, libraries: &[Library]) -> Finding {
    let variable = facts.machine.variable(BACKEND_VARIABLE).filter(|name| !name.is_empty());
    let Some(name) = variable else {
        return Finding::ok(BACKEND_VARIABLE, "not set: programs use the first backend that has a device");
    };
    let backends = Backends::registered();
    let backends: Vec<&str> = backends.registrations().iter().map(Registration::name).collect();
    if !backends.contains(&name) {
        let change = format!("unset {BACKEND_VARIABLE}, or set it to one of: {}", backends.join(", "));
        return Finding::problem(BACKEND_VARIABLE, format!("{name:?} is not a backend"), change);
    }
    if libraries.iter().any(|library| library.name() == name && library.available().is_none()) {
        return Finding::problem(
            BACKEND_VARIABLE,
            format!("{name:?} is unavailable, and programs that do not name a backend use no other"),
            format!("unset {BACKEND_VARIABLE}, or remove the cause that is stated for {name}"),
        );
    }
    Finding::ok(BACKEND_VARIABLE, format!("{name:?}: programs that do not name a backend use this one"))
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::TestMachine;
    use super::super::libraries::tests::{with_peers, without};
    use super::*;
    use device_ipc::backend::{Unavailable, Verdict};

    #[test]
    fn devices_without_peer_access_are_listed() {
        let verdict = |peers| peer_access(&with_peers("cuda", peers)).unwrap();
        assert_eq!(verdict(vec![vec![true]]).verdict, Verdict::Ok);
        assert_eq!(verdict(vec![vec![true, true], vec![true, true]]).verdict, Verdict::Ok);
        let unreachable = verdict(vec![vec![true, true], vec![false, true]]);
        assert!(
            unreachable.verdict == Verdict::Warning && unreachable.found.ends_with("devices: 1 -> 0"),
            "{unreachable:?}"
        );
    }

    #[test]
    fn backend_variable_names_an_available_backend() {
        let libraries = [
            with_peers("mock", vec![vec![true]]),
            without("cuda", Unavailable::NoDevice { detail: "none".into() }),
        ];
        let verdict = |value: Option<&str>| {
            let machine = TestMachine::new();
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
            "{unavailable:?}"
        );
        let unknown = verdict(Some("nvidia"));
        let change = unknown.change.as_deref().unwrap_or_default();
        assert!(unknown.verdict == Verdict::Problem && change.contains("cuda, ascend, mock"), "{unknown:?}");
    }
}
