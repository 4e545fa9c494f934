//! The properties of a machine that the checks inspect.

use std::fs;
use std::os::unix::fs::MetadataExt;

use device_ipc::backend::Machine;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

/// The properties of a machine: of this one, or of one that a test creates.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) machine: Machine,
    /// Results of system calls, with the reason for a failure.
    pub(super) sealed_memory: Result<(), String>,
    pub(super) process_descriptors: Result<(), String>,
    pub(super) abstract_sockets: Result<(), String>,
}

impl Facts {
    pub(super) fn of_this_machine() -> Self {
        Self {
            machine: Machine::this(),
            sealed_memory: try_sealed_memory().map_err(|error| error.to_string()),
            process_descriptors: pidfd_open(getpid(), PidfdFlags::empty())
                .map(drop)
                .map_err(|error| error.to_string()),
            abstract_sockets: try_abstract_socket().map_err(|error| error.to_string()),
        }
    }

    /// Returns the number of a namespace of this process, which the link contains as in `pid:[4026531836]`.
    pub(super) fn namespace(&self, kind: &str) -> Option<u64> {
        let path = self.machine.path(format!("/proc/self/ns/{kind}"));
        let link = fs::read_link(&path).ok()?;
        let text = link.to_str()?;
        let number = text.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok();
        number.or_else(|| fs::metadata(&path).ok().map(|metadata| metadata.ino()))
    }
}

/// Creates a memory file of fixed size, as the library does for counter pages.
fn try_sealed_memory() -> rustix::io::Result<()> {
    let file = memfd_create("device-ipc-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    fcntl_get_seals(&file).map(drop)
}

fn try_abstract_socket() -> rustix::io::Result<()> {
    let name = format!("device-ipc.doctor.{}", std::process::id());
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    /// A machine that a test creates. Without further calls it has no files, and all system calls succeed.
    pub(in crate::doctor) struct TestMachine {
        pub(in crate::doctor) facts: Facts,
        root: tempfile::TempDir,
    }

    impl TestMachine {
        pub(in crate::doctor) fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let facts = Facts {
                machine: Machine::below(root.path()),
                sealed_memory: Ok(()),
                process_descriptors: Ok(()),
                abstract_sockets: Ok(()),
            };
            Self { facts, root }
        }

        pub(in crate::doctor) fn with(self, path: &str, text: &str) -> Self {
            let path = self.facts.machine.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        pub(in crate::doctor) fn with_directory(self, path: &str) -> Self {
            fs::create_dir_all(self.facts.machine.path(path)).unwrap();
            self
        }

        pub(in crate::doctor) fn with_link(self, path: &str, target: &str) -> Self {
            let path = self.facts.machine.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(target, path).unwrap();
            self
        }

        pub(in crate::doctor) fn with_variable(mut self, name: &str, value: &str) -> Self {
            self.facts.machine = self.facts.machine.with_variable(name, value);
            self
        }

        pub(in crate::doctor) fn root(&self) -> &Path {
            self.root.path()
        }
    }

    #[test]
    fn facts_are_read_below_the_root() {
        let machine =
            TestMachine::new().with("/proc/a", "text").with_link("/proc/self/ns/pid", "pid:[4026531836]");
        let facts = &machine.facts;
        assert_eq!(facts.machine.text("/proc/a").as_deref(), Some("text"));
        assert_eq!(facts.machine.names("/proc"), ["a", "self"]);
        assert_eq!(facts.namespace("pid"), Some(4_026_531_836));
        assert_eq!(facts.namespace("net"), None);
        assert!(!facts.machine.exists("/etc/passwd") && !facts.machine.in_container());
    }

    #[test]
    fn system_calls_succeed_on_this_machine() {
        let facts = Facts::of_this_machine();
        assert_eq!(facts.sealed_memory, Ok(()));
        assert_eq!(facts.abstract_sockets, Ok(()));
        assert!(facts.namespace("pid").is_some());
    }
}
