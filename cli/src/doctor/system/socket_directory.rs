//! Check of the socket directory.

use std::path::Path;

use rustix::fs::{Access, access};

use crate::doctor::facts::Facts;
use device_ipc::backend::Finding;

/// Maximum length of the directory: the path of a socket has at most 107 B (unix(7)), of which the name has up to 50.
const MAX_DIRECTORY_BYTES: usize = 107 - 50;

pub(super) fn socket_directory(facts: &Facts) -> Finding {
    let check = "DEVICE_IPC_SOCKET_DIR";
    let Some(directory) = facts.machine.variable(check).filter(|value| !value.is_empty()) else {
        return Finding::ok(check, "not set: sockets are abstract and need no directory");
    };
    if directory.len() > MAX_DIRECTORY_BYTES {
        let found = format!(
            "the path {directory} has {} B, too long: the path of a socket has at most 107 B",
            directory.len()
        );
        return Finding::problem(check, found, "choose a directory with a shorter path");
    }
    let path = facts.machine.path(Path::new(directory));
    if !path.is_dir() {
        let change = format!("mkdir -p {directory}");
        return Finding::problem(check, format!("{directory} does not exist or is not a directory"), change);
    }
    if access(&path, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        let found = format!("permission denied: this user cannot create files in {directory}");
        return Finding::problem(check, found, format!("chmod u+rwx {directory}, or chown it to this user"));
    }
    Finding::ok(check, format!("{directory} exists and is writable; peers must use the same directory"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::doctor::facts::tests::TestMachine;
    use device_ipc::backend::Verdict;

    #[test]
    fn missing_read_only_or_long_directory_is_a_problem() {
        let verdict = |machine: &TestMachine| socket_directory(&machine.facts).verdict;
        assert_eq!(verdict(&TestMachine::new()), Verdict::Ok);
        let machine = TestMachine::new().with_variable("DEVICE_IPC_SOCKET_DIR", "/run/ipc");
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
        let machine = TestMachine::new().with_directory(&long).with_variable("DEVICE_IPC_SOCKET_DIR", &long);
        assert!(socket_directory(&machine.facts).found.contains("at most 107 B"));
    }
}
