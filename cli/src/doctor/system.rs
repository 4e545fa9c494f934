//! The operating system: `/proc`, shared memory, namespaces, limits, sockets.

use std::path::Path;

use indicatif::HumanBytes;
use rustix::fs::{Access, access};

use super::facts::Facts;
use super::finding::Finding;
use super::nvidia;

/// The numbers of the first namespaces of a machine (`include/linux/proc_ns.h`).
const FIRST_USER_NAMESPACE: u64 = 0xEFFF_FFFD;
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// What is left for a socket's directory of the 107 bytes that a path may have (unix(7)): the name has up to 50.
const MAX_DIRECTORY_BYTES: usize = 107 - 50;

pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    vec![
        proc_files(facts),
        shared_memory(facts),
        pid_namespace(facts),
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

/// Processes are told apart by what stands there.
fn proc_files(facts: &Facts) -> Finding {
    let check = "/proc";
    for path in ["/proc/self/stat", "/proc/sys/kernel/random/boot_id"] {
        if facts.text(path).is_none() {
            let found = format!("{path} cannot be read, and processes are told apart by it");
            return Finding::problem(check, found, "mount -t proc proc /proc");
        }
    }
    Finding::ok(check, "is there, and tells this pid namespace's processes apart")
}

fn shared_memory(facts: &Facts) -> Finding {
    let check = "/dev/shm";
    let change = "docker run --shm-size=1g …; in Kubernetes an emptyDir with medium Memory at /dev/shm; else: mount -t \
                  tmpfs -o size=1g tmpfs /dev/shm";
    if !facts.exists("/dev/shm") {
        let found =
            "is missing; CUDA keeps the events there that processes share, so sharing with ready_on fails";
        // Nobody else needs it.
        let make = if nvidia::is_there(facts) { Finding::problem } else { Finding::warning };
        return make(check, found.to_owned(), change.to_owned());
    }
    let Some((kind, size)) = facts.text("/proc/self/mountinfo").and_then(|text| mounted_at(&text, check))
    else {
        return Finding::warning(check, "is a plain directory, and CUDA expects memory there", change);
    };
    if kind != "tmpfs" {
        return Finding::warning(check, format!("is {kind}, and CUDA expects a tmpfs there"), change);
    }
    let shown = size.map_or("half of the machine's memory".to_owned(), |size| HumanBytes(size).to_string());
    if size.is_some_and(|size| size < 16 * 1024 * 1024) {
        let found = format!("has {shown}; events of many exports, and other libraries, may fill it");
        return Finding::warning(check, found, change);
    }
    let whose = if facts.in_container() {
        "; it may be this container's own: then CUDA's events do not reach other containers, and device-ipc's words, \
         which it prefers, do"
    } else {
        ""
    };
    Finding::ok(check, format!("tmpfs of {shown}{whose}"))
}

/// File system and size in bytes of what is mounted there last (proc_pid_mountinfo(5)).
fn mounted_at(mountinfo: &str, path: &str) -> Option<(String, Option<u64>)> {
    let line = mountinfo.lines().rfind(|line| line.split(' ').nth(4) == Some(path))?;
    let (_, behind) = line.split_once(" - ")?;
    let mut fields = behind.split(' ');
    let kind = fields.next()?.to_owned();
    let options = fields.nth(1).unwrap_or_default();
    let size = options.split(',').find_map(|option| option.strip_prefix("size="));
    Some((kind, size.and_then(bytes_of)))
}

/// `65536k`, `64m`, `1g`, or bytes.
fn bytes_of(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: u64 = match &text[digits.len()..] {
        "" => 1,
        "k" => 1024,
        "m" => 1024 * 1024,
        "g" => 1024 * 1024 * 1024,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn pid_namespace(facts: &Facts) -> Finding {
    let check = "pid namespace";
    match facts.namespace("pid") {
        None => Finding::problem(check, "/proc/self/ns/pid cannot be read", "mount -t proc proc /proc"),
        Some(FIRST_PID_NAMESPACE) => {
            Finding::ok(check, "the machine's own: process ids are the same for everybody here")
        }
        Some(number) => Finding::warning(
            check,
            format!(
                "{number}, one of its own: with processes of other pid namespaces sharing works, but for CUDA's plain \
                 memory (cudaMalloc) between two processes that have the same process id in theirs, as 1 in two containers"
            ),
            "where the error says so: share a pid namespace (shareProcessNamespace: true; docker --pid), start one side \
             by a shell so that its id is another, or share virtual memory or a pool",
        ),
    }
}

fn net_namespace(facts: &Facts) -> Finding {
    let check = "network namespace and sockets";
    let directory = "set DEVICE_IPC_SOCKET_DIR to a directory that both sides mount, in both";
    if let Err(why) = &facts.abstract_sockets {
        let found = format!("abstract Unix sockets cannot be made here: {why}");
        return if facts.variable("DEVICE_IPC_SOCKET_DIR").is_some() {
            Finding::ok(check, format!("{found}; DEVICE_IPC_SOCKET_DIR is used instead"))
        } else {
            Finding::problem(check, found, directory)
        };
    }
    let Some(number) = facts.namespace("net") else {
        return Finding::problem(check, "/proc/self/ns/net cannot be read", "mount -t proc proc /proc");
    };
    let found =
        format!("abstract Unix sockets work; a peer has to be in this network namespace ({number}) too");
    if facts.in_container() && facts.variable("DEVICE_IPC_SOCKET_DIR").is_none() {
        let change = format!("nothing between containers of one pod; between others, {directory}");
        return Finding::warning(check, found, change);
    }
    Finding::ok(check, found)
}

fn user_namespace(facts: &Facts) -> Finding {
    let check = "user namespace";
    let Some(number) = facts.namespace("user") else {
        return Finding::ok(check, "the kernel has none");
    };
    let map = facts.text("/proc/self/uid_map").unwrap_or_default();
    let whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if number == FIRST_USER_NAMESPACE || whole {
        return Finding::ok(check, "user ids are the machine's own");
    }
    Finding::warning(
        check,
        format!("{number}, one of its own: users that it does not map are seen as nobody, and refused"),
        "run both sides in the same user namespace (without rootless mode or userns-remap for one of them alone)",
    )
}

fn socket_directory(facts: &Facts) -> Finding {
    let check = "DEVICE_IPC_SOCKET_DIR";
    let Some(directory) = facts.variable(check).filter(|value| !value.is_empty()) else {
        return Finding::ok(check, "not set: sockets are abstract, and need no file system");
    };
    if directory.len() > MAX_DIRECTORY_BYTES {
        let found =
            format!("{directory} has {} bytes, and a socket's whole path 107 at most", directory.len());
        return Finding::problem(check, found, "choose a directory with a shorter path");
    }
    let path = facts.at(Path::new(directory));
    if !path.is_dir() {
        let change = format!("mkdir -p {directory}");
        return Finding::problem(check, format!("{directory} is no directory"), change);
    }
    if access(&path, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        let found = format!("no file can be made in {directory} by this user");
        return Finding::problem(check, found, format!("chmod u+rwx {directory}, or chown it to this user"));
    }
    Finding::ok(check, format!("{directory} is there and can be written; peers need the same directory"))
}

fn sealed_memory(facts: &Facts) -> Finding {
    let check = "sealed memory (memfd_create)";
    match &facts.sealed_memory {
        Ok(()) => Finding::ok(check, "works"),
        Err(why) => Finding::problem(
            check,
            format!("does not work ({why}), and words between processes are in it"),
            "allow memfd_create and fcntl(F_ADD_SEALS) in the sandbox's seccomp profile; they are in Linux since 3.17",
        ),
    }
}

fn process_descriptors(facts: &Facts) -> Finding {
    let check = "process descriptors (pidfd_open)";
    match &facts.process_descriptors {
        Ok(()) => Finding::ok(check, "work"),
        Err(why) => Finding::warning(
            check,
            format!(
                "do not work ({why}): a peer's death is seen by its socket alone, which its forked children may keep open"
            ),
            "use Linux 5.3 or newer, and allow pidfd_open in the sandbox's seccomp profile",
        ),
    }
}

fn open_files(facts: &Facts) -> Finding {
    let check = "limit on open files";
    let change = "ulimit -n 65536 (docker run --ulimit nofile=65536; LimitNOFILE=65536 in systemd)";
    match limit(facts, "Max open files") {
        None => Finding::warning(check, "/proc/self/limits does not tell it", change),
        Some(Limit::Of(files)) if files < 64 => {
            Finding::problem(check, format!("{files} files: too few for sockets and handles"), change)
        }
        Some(Limit::Of(files)) if files < 1024 => Finding::warning(
            check,
            format!("{files} files; each block of virtual memory that travels (2 MiB or more) takes one"),
            change,
        ),
        Some(limit) => {
            Finding::ok(check, format!("{limit} files; each block of virtual memory that travels takes one"))
        }
    }
}

fn locked_memory(facts: &Facts) -> Finding {
    let check = "limit on locked memory";
    let change = "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in systemd)";
    match limit(facts, "Max locked memory") {
        None => Finding::warning(check, "/proc/self/limits does not tell it", change),
        Some(Limit::Of(bytes)) if bytes < 64 * 1024 => Finding::warning(
            check,
            format!("{}: pages of words that streams wait on are pinned, 4 KiB for each", HumanBytes(bytes)),
            change,
        ),
        Some(Limit::Of(bytes)) => Finding::ok(check, HumanBytes(bytes).to_string()),
        Some(Limit::None) => Finding::ok(check, "unlimited"),
    }
}

enum Limit {
    None,
    Of(u64),
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("any number of"),
            Self::Of(limit) => limit.fmt(f),
        }
    }
}

/// The soft limit (proc_pid_limits(5)).
fn limit(facts: &Facts, name: &str) -> Option<Limit> {
    let limits = facts.text("/proc/self/limits")?;
    let soft = limits.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())?;
    if soft == "unlimited" { Some(Limit::None) } else { soft.parse().ok().map(Limit::Of) }
}

/// Said because other libraries need it, and people look for it.
fn ptrace(facts: &Facts) -> Finding {
    let scope = facts.text("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.as_deref().map_or("not there", str::trim);
    Finding::ok(
        "ptrace",
        format!(
            "not needed (kernel.yama.ptrace_scope is {scope}): file descriptors are sent, not taken by pidfd_getfd; no \
             CAP_SYS_PTRACE either"
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::super::facts::tests::Machine;
    use super::super::finding::Verdict;
    use super::*;

    fn found(finding: &Finding) -> (Verdict, &str) {
        (finding.verdict, &finding.found)
    }

    fn with_shm(mount: &str) -> Machine {
        Machine::new().with_directory("/dev/shm").with("/proc/self/mountinfo", mount)
    }

    #[test]
    fn shared_memory_is_missing_tiny_something_else_or_good() {
        assert_eq!(shared_memory(&Machine::new().facts).verdict, Verdict::Warning);
        let missing = shared_memory(&Machine::new().with("/proc/driver/nvidia/version", "").facts);
        assert!(missing.verdict == Verdict::Problem && missing.change.unwrap().contains("--shm-size"));
        let directory = shared_memory(&with_shm("").facts);
        assert!(directory.verdict == Verdict::Warning && directory.found.contains("plain directory"));
        let root = "22 1 0:20 / / rw shared:1 - overlay overlay rw\n";
        for (mount, verdict, words) in [
            (
                "30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=65536k,inode64",
                Verdict::Ok,
                "64.00 MiB",
            ),
            ("30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,inode64", Verdict::Ok, "half of"),
            ("30 22 0:26 / /dev/shm rw - tmpfs shm rw,size=4096k", Verdict::Warning, "4.00 MiB"),
            ("30 22 0:26 / /dev/shm rw - ext4 /dev/sda1 rw", Verdict::Warning, "is ext4"),
        ] {
            let finding = shared_memory(&with_shm(&format!("{root}{mount}\n")).facts);
            assert!(found(&finding).0 == verdict && finding.found.contains(words), "{finding}");
        }
        let mount = "30 22 0:26 / /dev/shm rw - tmpfs shm rw,size=65536k";
        let container = shared_memory(&with_shm(mount).with("/.dockerenv", "").facts);
        assert!(
            container.verdict == Verdict::Ok && container.found.contains("container's own"),
            "{container}"
        );
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(bytes_of("65536k"), Some(64 * 1024 * 1024));
        assert_eq!(bytes_of("12"), Some(12));
        assert_eq!(bytes_of("1g"), Some(1 << 30));
        assert_eq!(bytes_of("50%"), None);
        assert_eq!(bytes_of("18446744073709551615g"), None);
    }

    #[test]
    fn a_machine_without_proc_is_told_to_mount_it() {
        let without = proc_files(&Machine::new().facts);
        assert!(without.verdict == Verdict::Problem && without.change.unwrap().contains("mount -t proc"));
        let with = Machine::new().with("/proc/self/stat", "1").with("/proc/sys/kernel/random/boot_id", "x");
        assert_eq!(proc_files(&with.facts).verdict, Verdict::Ok);
    }

    #[test]
    fn namespaces_of_their_own_are_warned_of_and_the_machines_are_not() {
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
    fn without_abstract_sockets_a_directory_is_needed() {
        let mut machine = Machine::new().with_link("/proc/self/ns/net", "net:[1]");
        machine.facts.abstract_sockets = Err("Operation not permitted".into());
        let finding = net_namespace(&machine.facts);
        assert!(finding.verdict == Verdict::Problem && finding.found.contains("not permitted"), "{finding}");
        let machine = machine.with_variable("DEVICE_IPC_SOCKET_DIR", "/run/ipc");
        assert_eq!(net_namespace(&machine.facts).verdict, Verdict::Ok);
    }

    #[test]
    fn the_socket_directory_has_to_be_there_to_be_writable_and_to_be_short() {
        let verdict = |machine: &Machine| socket_directory(&machine.facts).verdict;
        assert_eq!(verdict(&Machine::new()), Verdict::Ok);
        let machine = Machine::new().with_variable("DEVICE_IPC_SOCKET_DIR", "/run/ipc");
        let finding = socket_directory(&machine.facts);
        assert_eq!(
            (finding.verdict, finding.change.as_deref()),
            (Verdict::Problem, Some("mkdir -p /run/ipc"))
        );
        let machine = machine.with_directory("/run/ipc");
        assert_eq!(verdict(&machine), Verdict::Ok);
        if !rustix::process::geteuid().is_root() {
            let path = machine.root().join("run/ipc");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o500)).unwrap();
            assert_eq!(verdict(&machine), Verdict::Problem);
        }
        let long = format!("/{}", "d".repeat(80));
        let machine = Machine::new().with_directory(&long).with_variable("DEVICE_IPC_SOCKET_DIR", &long);
        assert!(socket_directory(&machine.facts).found.contains("107 at most"));
    }

    #[test]
    fn calls_that_a_sandbox_forbids_are_named() {
        let mut machine = Machine::new();
        assert_eq!(sealed_memory(&machine.facts).verdict, Verdict::Ok);
        assert_eq!(process_descriptors(&machine.facts).verdict, Verdict::Ok);
        machine.facts.sealed_memory = Err("Function not implemented".into());
        machine.facts.process_descriptors = Err("Function not implemented".into());
        assert_eq!(sealed_memory(&machine.facts).verdict, Verdict::Problem);
        assert_eq!(process_descriptors(&machine.facts).verdict, Verdict::Warning);
    }

    #[test]
    fn limits_are_read_from_where_the_kernel_tells_them() {
        let machine = |files: &str, locked: &str| {
            let text = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max open files            {files}                 524288               files     \n\
                 Max locked memory         {locked}              8388608              bytes     \n"
            );
            Machine::new().with("/proc/self/limits", &text)
        };
        for (files, verdict) in [
            ("1024", Verdict::Ok),
            ("unlimited", Verdict::Ok),
            ("256", Verdict::Warning),
            ("16", Verdict::Problem),
        ] {
            assert_eq!(open_files(&machine(files, "0").facts).verdict, verdict, "{files}");
        }
        for (locked, verdict) in
            [("8388608", Verdict::Ok), ("unlimited", Verdict::Ok), ("0", Verdict::Warning)]
        {
            assert_eq!(locked_memory(&machine("1024", locked).facts).verdict, verdict, "{locked}");
        }
        assert_eq!(open_files(&Machine::new().facts).verdict, Verdict::Warning);
    }

    #[test]
    fn ptrace_is_never_in_the_way() {
        let finding = ptrace(&Machine::new().with("/proc/sys/kernel/yama/ptrace_scope", "3\n").facts);
        assert!(finding.verdict == Verdict::Ok && finding.found.contains("ptrace_scope is 3"), "{finding}");
    }
}
