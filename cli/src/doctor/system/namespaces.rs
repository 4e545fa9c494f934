//! Checks of the pid, network and user namespaces.

use crate::doctor::facts::Facts;
use crate::doctor::libraries::Library;
use device_ipc::backend::Finding;

/// The numbers of the first namespaces of a machine (`include/linux/proc_ns.h`).
const FIRST_USER_NAMESPACE: u64 = 0xEFFF_FFFD;
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

pub(super) fn pid_namespace(facts: &Facts, libraries: &[Library]) -> Finding {
    let check = "pid namespace";
    match facts.namespace("pid") {
        None => Finding::problem(check, "cannot read /proc/self/ns/pid", "mount -t proc proc /proc"),
        Some(FIRST_PID_NAMESPACE) => {
            Finding::ok(check, "the initial one: process ids are the same for all processes of the machine")
        }
        Some(number) => {
            let found = format!(
                "{number}, not the initial one: sharing with processes of other pid namespaces works"
            );
            let available = libraries.iter().filter_map(|library| Some((library, library.available()?)));
            let kinds: Vec<String> = available
                .flat_map(|(library, available)| {
                    let kinds = available.kinds_with_process_ids.iter();
                    kinds.map(|kind| format!("{} ({kind})", library.name()))
                })
                .collect();
            if kinds.is_empty() {
                return Finding::ok(check, found);
            }
            Finding::warning(
                check,
                format!(
                    "{found}, except for memory of {} between two processes with the same process id, such as 1 in two containers",
                    kinds.join(" and ")
                ),
                "if an error reports it: share a pid namespace (shareProcessNamespace: true; docker --pid), start one side from \
                 a shell so that its id differs, or share memory of another kind",
            )
        }
    }
}

pub(super) fn net_namespace(facts: &Facts) -> Finding {
    let check = "network namespace and sockets";
    let directory = "set DEVICE_IPC_SOCKET_DIR in both processes to a directory that both mount";
    if let Err(why) = &facts.abstract_sockets {
        let found = format!("abstract Unix sockets are not available: {why}");
        return if facts.machine.variable("DEVICE_IPC_SOCKET_DIR").is_some() {
            Finding::ok(check, format!("{found}; DEVICE_IPC_SOCKET_DIR is used instead"))
        } else {
            Finding::problem(check, found, directory)
        };
    }
    let Some(number) = facts.namespace("net") else {
        return Finding::problem(check, "cannot read /proc/self/ns/net", "mount -t proc proc /proc");
    };
    let found = format!(
        "abstract Unix sockets are available; peers must be in the same network namespace ({number})"
    );
    if facts.machine.in_container() && facts.machine.variable("DEVICE_IPC_SOCKET_DIR").is_none() {
        let change =
            format!("no action between containers of one pod; between other containers, {directory}");
        return Finding::warning(check, found, change);
    }
    Finding::ok(check, found)
}

pub(super) fn user_namespace(facts: &Facts) -> Finding {
    let check = "user namespace";
    let Some(number) = facts.namespace("user") else {
        return Finding::ok(check, "not supported by the kernel");
    };
    let map = facts.machine.text("/proc/self/uid_map").unwrap_or_default();
    let whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if number == FIRST_USER_NAMESPACE || whole {
        return Finding::ok(check, "user ids are those of the machine");
    }
    Finding::warning(
        check,
        format!("{number}, not the initial one: users without a mapping appear as nobody and are rejected"),
        "run both sides in the same user namespace (rootless mode or userns-remap for both or for none)",
    )
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::doctor::facts::tests::TestMachine;
    use crate::doctor::libraries::tests::with_peers;
    use device_ipc::backend::Verdict;

    #[test]
    fn private_namespaces_are_a_warning() {
        let machine = TestMachine::new()
            .with_link("/proc/self/ns/pid", "pid:[4026531836]")
            .with_link("/proc/self/ns/user", "user:[4026531837]")
            .with_link("/proc/self/ns/net", "net:[4026531840]");
        let facts = &machine.facts;
        for finding in [pid_namespace(facts, &[]), user_namespace(facts), net_namespace(facts)] {
            assert_eq!(finding.verdict, Verdict::Ok, "{finding:?}");
        }
        let container = TestMachine::new()
            .with_link("/proc/self/ns/pid", "pid:[4026532999]")
            .with_link("/proc/self/ns/user", "user:[4026532998]")
            .with_link("/proc/self/ns/net", "net:[4026532997]")
            .with("/proc/self/uid_map", "         0       1000          1\n")
            .with("/.dockerenv", "");
        let mut library = with_peers("mock", vec![vec![true]]);
        assert_eq!(pid_namespace(&container.facts, std::slice::from_ref(&library)).verdict, Verdict::Ok);
        let Ok(available) = &mut library.state else { unreachable!() };
        available.kinds_with_process_ids.push("legacy".into());
        let finding = pid_namespace(&container.facts, &[library]);
        assert_eq!(finding.verdict, Verdict::Warning);
        assert!(finding.found.contains("mock (legacy) between two processes"), "{finding:?}");
        for check in [user_namespace, net_namespace] {
            let finding = check(&container.facts);
            assert_eq!(finding.verdict, Verdict::Warning, "{finding:?}");
        }
        let mapped = container.with("/proc/self/uid_map", "         0          0 4294967295\n");
        assert_eq!(user_namespace(&mapped.facts).verdict, Verdict::Ok);
        let without = pid_namespace(&TestMachine::new().facts, &[]);
        assert_eq!(without.verdict, Verdict::Problem, "{without:?}");
    }

    #[test]
    fn missing_abstract_sockets_require_a_directory() {
        let mut machine = TestMachine::new().with_link("/proc/self/ns/net", "net:[1]");
        machine.facts.abstract_sockets = Err("Operation not permitted".into());
        let finding = net_namespace(&machine.facts);
        assert!(
            finding.verdict == Verdict::Problem && finding.found.contains("not permitted"),
            "{finding:?}"
        );
        let machine = machine.with_variable("DEVICE_IPC_SOCKET_DIR", "/run/ipc");
        assert_eq!(net_namespace(&machine.facts).verdict, Verdict::Ok);
    }
}
