//! Checks of the operating system.

mod limits;
mod namespaces;
mod socket_directory;

use super::facts::Facts;
use super::libraries::Library;
use device_ipc::backend::Finding;
use limits::{locked_memory, open_files};
use namespaces::{net_namespace, pid_namespace, user_namespace};
use socket_directory::socket_directory;

pub(super) fn check(facts: &Facts, libraries: &[Library]) -> Vec<Finding> {
    vec![
        proc_files(facts),
        pid_namespace(facts, libraries),
        net_namespace(facts),
        user_namespace(facts),
        socket_directory(facts),
        sealed_memory(facts),
        process_descriptors(facts),
        open_files(facts),
        locked_memory(facts),
        ptrace(facts),
    ]
}

/// Checks the files of `/proc` that identify processes.
fn proc_files(facts: &Facts) -> Finding {
    let check = "/proc";
    for path in ["/proc/self/stat", "/proc/sys/kernel/random/boot_id"] {
        if facts.machine.text(path).is_none() {
            let found = format!("cannot read {path}, which is required to identify processes");
            return Finding::problem(check, found, "mount -t proc proc /proc");
        }
    }
    Finding::ok(check, "mounted, and identifies the processes of this pid namespace")
}

fn sealed_memory(facts: &Facts) -> Finding {
    let check = "sealed memory (memfd_create)";
    match &facts.sealed_memory {
        Ok(()) => Finding::ok(check, "available"),
        Err(why) => Finding::problem(
            check,
            format!("not available ({why}), but required for counters that processes share"),
            "allow memfd_create and fcntl(F_ADD_SEALS) in the seccomp profile of the sandbox; Linux has them since 3.17",
        ),
    }
}

fn process_descriptors(facts: &Facts) -> Finding {
    let check = "process descriptors (pidfd_open)";
    match &facts.process_descriptors {
        Ok(()) => Finding::ok(check, "available"),
        Err(why) => Finding::warning(
            check,
            format!(
                "not available ({why}): the termination of a peer is detected by its socket only, which its forked children may keep \
                 open"
            ),
            "use Linux 5.3 or newer, and allow pidfd_open in the seccomp profile of the sandbox",
        ),
    }
}

/// Reports that ptrace is not required, because other libraries require it and users look for it.
fn ptrace(facts: &Facts) -> Finding {
    let scope = facts.machine.text("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.as_deref().map_or("not set", str::trim);
    Finding::ok(
        "ptrace",
        format!(
            "not required (kernel.yama.ptrace_scope is {scope}), and no CAP_SYS_PTRACE: file descriptors are sent over a socket, \
             not taken by pidfd_getfd"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::TestMachine;
    use super::*;
    use device_ipc::backend::Verdict;

    #[test]
    fn missing_proc_is_a_problem() {
        let without = proc_files(&TestMachine::new().facts);
        assert!(without.verdict == Verdict::Problem && without.change.unwrap().contains("mount -t proc"));
        let with =
            TestMachine::new().with("/proc/self/stat", "1").with("/proc/sys/kernel/random/boot_id", "x");
        assert_eq!(proc_files(&with.facts).verdict, Verdict::Ok);
    }

    #[test]
    fn forbidden_system_calls_are_reported() {
        let mut machine = TestMachine::new();
        assert_eq!(sealed_memory(&machine.facts).verdict, Verdict::Ok);
        assert_eq!(process_descriptors(&machine.facts).verdict, Verdict::Ok);
        machine.facts.sealed_memory = Err("Function not implemented".into());
        machine.facts.process_descriptors = Err("Function not implemented".into());
        assert_eq!(sealed_memory(&machine.facts).verdict, Verdict::Problem);
        assert_eq!(process_descriptors(&machine.facts).verdict, Verdict::Warning);
    }

    #[test]
    fn ptrace_is_always_ok() {
        let finding = ptrace(&TestMachine::new().with("/proc/sys/kernel/yama/ptrace_scope", "3\n").facts);
        assert!(finding.verdict == Verdict::Ok && finding.found.contains("ptrace_scope is 3"), "{finding:?}");
    }
}
