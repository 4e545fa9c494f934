//! Checks of the pid, network and user namespaces.

use crate::doctor::facts::Facts;
use crate::doctor::finding::Finding;

/// The numbers of the first namespaces of a machine (`include/linux/proc_ns.h`).
const FIRST_USER_NAMESPACE: u64 = 0xEFFF_FFFD;
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

pub(super) fn pid_namespace(facts: &Facts) -> Finding {
    let check = "pid namespace";
    match facts.namespace("pid") {
        None => Finding::problem(check, "cannot read /proc/self/ns/pid", "mount -t proc proc /proc"),
        Some(FIRST_PID_NAMESPACE) => {
            Finding::ok(check, "the initial one: process ids are the same for all processes of the machine")
        }
        Some(number) => Finding::warning(
            check,
            format!(
                "{number}, not the initial one: sharing with processes of other pid namespaces works, except for plain CUDA \
                 memory (cudaMalloc) between two processes with the same process id, such as 1 in two containers"
            ),
            "if an error reports it: share a pid namespace (shareProcessNamespace: true; docker --pid), start one side from \
             a shell so that its id differs, or share virtual memory or a pool",
        ),
    }
}

pub(super) fn net_namespace(facts: &Facts) -> Finding {
    let check = "network namespace and sockets";
    let directory = "set DEVICE_IPC_SOCKET_DIR in both processes to a directory that both mount";
    if let Err(why) = &facts.abstract_sockets {
        let found = format!("abstract Unix sockets are not available: {why}");
        return if facts.variable("DEVICE_IPC_SOCKET_DIR").is_some() {
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
    if facts.in_container() && facts.variable("DEVICE_IPC_SOCKET_DIR").is_none() {
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
    let map = facts.text("/proc/self/uid_map").unwrap_or_default();
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
    use crate::doctor::facts::tests::Machine;
    use crate::doctor::finding::Verdict;

    #[test]
    fn private_namespaces_are_a_warning() {
        let machine = Machine::new()
            .with_link("/proc/self/ns/pid", "pid:[4026531836]")
            .with_link("/proc/self/ns/user", "user:[4026531837]")
            .with_link("/proc/self/ns/net", "net:[4026531840]");
        for check in [pid_namespace, user_namespace, net_namespace] {
            let finding = check(&machine.facts);
            assert_eq!(finding.verdict, Verdict::Ok, "{finding}");
        }
        let container = Machine::new()
            .with_link("/proc/self/ns/pid", "pid:[4026532999]")
            .with_link("/proc/self/ns/user", "user:[4026532998]")
            .with_link("/proc/self/ns/net", "net:[4026532997]")
            .with("/proc/self/uid_map", "         0       1000          1\n")
            .with("/.dockerenv", "");
        assert!(pid_namespace(&container.facts).found.contains("same process id"));
        for check in [pid_namespace, user_namespace, net_namespace] {
            let finding = check(&container.facts);
            assert_eq!(finding.verdict, Verdict::Warning, "{finding}");
        }
        let mapped = container.with("/proc/self/uid_map", "         0          0 4294967295\n");
        assert_eq!(user_namespace(&mapped.facts).verdict, Verdict::Ok);
        let without = pid_namespace(&Machine::new().facts);
        assert_eq!(without.verdict, Verdict::Problem, "{without}");
    }

    #[test]
    fn missing_abstract_sockets_require_a_directory() {
        let mut machine = Machine::new().with_link("/proc/self/ns/net", "net:[1]");
        machine.facts.abstract_sockets = Err("Operation not permitted".into());
        let finding = net_namespace(&machine.facts);
        assert!(finding.verdict == Verdict::Problem && finding.found.contains("not permitted"), "{finding}");
        let machine = machine.with_variable("DEVICE_IPC_SOCKET_DIR", "/run/ipc");
        assert_eq!(net_namespace(&machine.facts).verdict, Verdict::Ok);
    }
}
