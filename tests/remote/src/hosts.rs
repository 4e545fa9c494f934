//! Two network namespaces of this machine as two hosts.
//!
//! Each has a boot id and a machine id of its own, mounted over the files of the system in a mount namespace, so that the library
//! takes the other one for another host. A pair of virtual network devices connects them. A user namespace permits all of
//! this to any user, where the system permits user namespaces. The namespaces have no names: the system removes them, and their devices, with
//! the last process in them, however the test ends.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use device_ipc_test_process::{Process, command_of_test};

use crate::ADDRESS_VARIABLE;

/// The network device of each host.
pub const DEVICE: &str = "veth0";

/// Runs in new namespaces of a host until its input is closed, with the number of the host. UCX finds the network devices in `/sys`.
const HOST: &str = "
set -e
mount -t tmpfs none /tmp
echo 00000000-0000-4000-8000-00000000000$1 > /tmp/boot_id
echo 0000000000000000000000000000000$1 > /tmp/machine-id
mount --bind /tmp/boot_id /proc/sys/kernel/random/boot_id
[ ! -e /etc/machine-id ] || mount --bind /tmp/machine-id /etc/machine-id
umount -l /tmp
mount -t sysfs none /sys
ip link set lo up
echo ready
exec cat";

/// Two connected hosts.
#[derive(Debug)]
pub struct Hosts {
    pub(crate) exporter: Host,
    pub(crate) importer: Host,
}

/// A host: its namespaces exist as long as one of its processes.
#[derive(Debug)]
pub struct Host {
    /// The first process of the host.
    process: Child,
    pub(crate) address: &'static str,
}

impl Hosts {
    /// Creates the hosts.
    ///
    /// # Errors
    ///
    /// The reason why the system does not permit it.
    pub fn create() -> Result<Self, String> {
        // Addresses for documentation: no route of this machine has them.
        let mut users = Command::new("unshare");
        users.args(["--user", "--map-root-user"]);
        let exporter = Host::create(users, "1", "192.0.2.1")?;
        let importer = Host::create(exporter.enter(&["--user"]), "2", "192.0.2.2")?;
        let other = importer.process.id().to_string();
        exporter.ip(&["link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", &other])?;
        for host in [&exporter, &importer] {
            host.ip(&["address", "add", &format!("{}/24", host.address), "dev", DEVICE])?;
            host.ip(&["link", "set", DEVICE, "up"])?;
        }
        // UCX uses no device without a carrier.
        for host in [&exporter, &importer] {
            host.wait_for_carrier();
        }
        Ok(Self { exporter, importer })
    }
}

impl Host {
    /// Creates the namespaces of a host, by a command that runs another one in the user namespace.
    fn create(mut users: Command, number: &str, address: &'static str) -> Result<Self, String> {
        users.args(["unshare", "--mount", "--net", "sh", "-c", HOST, "sh", number]);
        users.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = users.spawn().map_err(|error| format!("{users:?}: {error}"))?;
        let (mut line, mut reason) = Default::default();
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        let read = output.read_line(&mut line);
        // From here on, a drop reaps it.
        let mut host = Self { process, address };
        if read.is_ok() && line == "ready\n" {
            return Ok(host);
        }
        let _ = host.process.stderr.take().expect("piped").read_to_string(&mut reason);
        Err(format!("namespaces are not permitted here: {}", reason.trim()))
    }

    /// Returns a command that runs another one in some namespaces of the host, as the same process.
    fn enter(&self, namespaces: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.process.id().to_string(), "--preserve-credentials"]);
        command.args(namespaces).arg("--");
        command
    }

    /// Returns a command that runs a program on the host.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.enter(&["--user", "--mount", "--net"]);
        command.arg(program);
        command
    }

    /// Starts an ignored test of this program on the host; see [`Process::of_test`].
    #[track_caller]
    pub fn process(&self, path: &str, variables: &[(&str, &str)]) -> Process {
        let test = command_of_test(path);
        let mut command = self.command(test.get_program());
        command.args(test.get_args());
        command.envs(test.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.envs(variables.iter().copied()).env(ADDRESS_VARIABLE, self.address);
        Process::start(path, &mut command)
    }

    /// Connects the host to the network, or disconnects it.
    #[track_caller]
    pub(crate) fn set_link(&self, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        self.ip(&["link", "set", DEVICE, state]).expect("the device exists");
        if is_up {
            self.wait_for_carrier();
            // Addresses that could not be resolved meanwhile are unreachable for a while.
            self.ip(&["neighbour", "flush", "dev", DEVICE]).expect("the device exists");
        }
    }

    #[track_caller]
    fn wait_for_carrier(&self) {
        let deadline = Instant::now() + crate::LONG;
        while !self.ip(&["link", "show", DEVICE]).expect("the device exists").contains("state UP") {
            assert!(Instant::now() < deadline, "{DEVICE} has no carrier");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs `ip`, and returns its output.
    fn ip(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = self.command("ip");
        let output = command.args(arguments).output().map_err(|error| format!("{command:?}: {error}"))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
