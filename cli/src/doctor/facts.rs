//! The properties of a machine that the checks inspect.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use device_ipc::backend::environment;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

/// The file that contains the version of the NVIDIA kernel driver.
pub(super) const NVIDIA_VERSION: &str = "/proc/driver/nvidia/version";

/// The device node of the Ascend driver that every use of a card requires.
pub(super) const ASCEND_MANAGER: &str = "/dev/davinci_manager";

/// The properties of a machine: of this one, or of one that a test creates.
#[derive(Debug)]
pub(super) struct Facts {
    /// The directory that is inspected in place of `/`.
    pub(super) root: PathBuf,
    pub(super) environment: HashMap<String, String>,
    pub(super) page_bytes: usize,
    /// Results of system calls, with the reason for a failure.
    pub(super) sealed_memory: Result<(), String>,
    pub(super) process_descriptors: Result<(), String>,
    pub(super) abstract_sockets: Result<(), String>,
}

impl Facts {
    pub(super) fn of_this_machine() -> Self {
        // Variables that are not UTF-8 are not relevant to any check.
        let environment = environment::variables()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self {
            root: PathBuf::from("/"),
            environment,
            page_bytes: rustix::param::page_size(),
            sealed_memory: try_sealed_memory().map_err(|error| error.to_string()),
            process_descriptors: pidfd_open(getpid(), PidfdFlags::empty())
                .map(drop)
                .map_err(|error| error.to_string()),
            abstract_sockets: try_abstract_socket().map_err(|error| error.to_string()),
        }
    }

    /// Returns an absolute path below the root.
    pub(super) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    pub(super) fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.at(path)).ok()
    }

    /// Returns the sorted names in a directory; empty if the directory does not exist.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Returns the number of a namespace of this process, which the link contains as in `pid:[4026531836]`.
    pub(super) fn namespace(&self, kind: &str) -> Option<u64> {
        let path = self.at(format!("/proc/self/ns/{kind}"));
        let link = fs::read_link(&path).ok()?;
        let text = link.to_str()?;
        let number = text.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok();
        number.or_else(|| fs::metadata(&path).ok().map(|metadata| metadata.ino()))
    }

    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.environment.get(name).map(String::as_str)
    }

    /// Returns whether the kernel has a driver of NVIDIA.
    pub(super) fn has_nvidia_driver(&self) -> bool {
        self.exists(NVIDIA_VERSION) || self.exists("/dev/nvidiactl")
    }

    /// Returns whether the machine has a device node of Ascend.
    pub(super) fn has_ascend_device(&self) -> bool {
        self.exists(ASCEND_MANAGER)
    }

    /// Returns whether this process appears to run in a container.
    pub(super) fn in_container(&self) -> bool {
        self.exists("/.dockerenv")
            || self.exists("/run/.containerenv")
            || self.variable("KUBERNETES_SERVICE_HOST").is_some()
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

    use super::*;

    /// A machine that a test creates. Without further calls it has no files, and all system calls succeed.
    pub(in crate::doctor) struct Machine {
        pub(in crate::doctor) facts: Facts,
        root: tempfile::TempDir,
    }

    impl Machine {
        pub(in crate::doctor) fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let facts = Facts {
                root: root.path().to_owned(),
                environment: HashMap::new(),
                page_bytes: 4096,
                sealed_memory: Ok(()),
                process_descriptors: Ok(()),
                abstract_sockets: Ok(()),
            };
            Self { facts, root }
        }

        pub(in crate::doctor) fn with(self, path: &str, text: &str) -> Self {
            let path = self.facts.at(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        pub(in crate::doctor) fn with_directory(self, path: &str) -> Self {
            fs::create_dir_all(self.facts.at(path)).unwrap();
            self
        }

        pub(in crate::doctor) fn with_link(self, path: &str, target: &str) -> Self {
            let path = self.facts.at(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(target, path).unwrap();
            self
        }

        pub(in crate::doctor) fn with_variable(mut self, name: &str, value: &str) -> Self {
            self.facts.environment.insert(name.into(), value.into());
            self
        }

        pub(in crate::doctor) fn root(&self) -> &Path {
            self.root.path()
        }
    }

    #[test]
    fn facts_are_read_below_the_root() {
        let machine =
            Machine::new().with("/proc/a", "text").with_link("/proc/self/ns/pid", "pid:[4026531836]");
        let facts = &machine.facts;
        assert_eq!(facts.text("/proc/a").as_deref(), Some("text"));
        assert_eq!(facts.names("/proc"), ["a", "self"]);
        assert_eq!(facts.namespace("pid"), Some(4_026_531_836));
        assert_eq!(facts.namespace("net"), None);
        assert!(!facts.exists("/etc/passwd") && !facts.in_container());
    }

    #[test]
    fn system_calls_succeed_on_this_machine() {
        let facts = Facts::of_this_machine();
        assert_eq!(facts.sealed_memory, Ok(()));
        assert_eq!(facts.abstract_sockets, Ok(()));
        assert!(facts.namespace("pid").is_some());
    }
}
