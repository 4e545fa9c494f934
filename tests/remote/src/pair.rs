//! The processes of a case: an exporter and an importer with the engine, and what they have open.

use std::time::{Duration, Instant};

use device_ipc_test_process::Process;

use crate::{Host, Hosts, LOOPBACK};

/// Timeout of calls that are to succeed, in ms.
pub(crate) const LONG_MS: u32 = 60_000;

/// Timeout of calls that fail by it, in ms.
pub(crate) const SHORT_MS: u32 = 1_000;

/// Starts a process with the engine, by the name of its test, and loads the engine. `None` if there is none on this machine.
pub type Start = fn(role: &str, arguments: &str) -> Option<Process>;

/// As [`Start`], with the conditions under which the process runs.
pub type StartUnder = fn(conditions: &Conditions<'_>, role: &str, arguments: &str) -> Option<Process>;

/// The conditions under which a process runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conditions<'a> {
    /// The host of the process, if it is not this one.
    pub host: Option<&'a Host>,
    /// The point at which the process kills or stops itself, as the variable `DEVICE_IPC_KILL_POINT` states it.
    pub kill_point: &'a str,
}

impl Conditions<'_> {
    /// Starts an ignored test of this program; see [`Process::of_test`].
    #[track_caller]
    pub fn process(&self, path: &str, variables: &[(&str, &str)]) -> Process {
        let mut variables = variables.to_vec();
        if !self.kill_point.is_empty() {
            variables.push(("DEVICE_IPC_KILL_POINT", self.kill_point));
        }
        self.host.map_or_else(|| Process::of_test(path, &variables), |host| host.process(path, &variables))
    }
}

/// The processes of a case.
#[derive(Debug)]
pub struct Pair {
    pub(crate) exporter: Process,
    pub(crate) importer: Process,
    /// Dropped after the processes.
    pub(crate) hosts: Option<Hosts>,
}

impl Pair {
    /// Starts an exporter and an importer.
    pub fn start(start: Start) -> Option<Self> {
        Some(Self { exporter: start("exporter", "")?, importer: start("importer", "")?, hosts: None })
    }

    /// Starts an exporter and an importer on two hosts. `None` if this machine does not permit that; prints the reason then.
    pub fn between_hosts(start: StartUnder) -> Option<Self> {
        let hosts = Hosts::create().inspect_err(|reason| eprintln!("skipped: {reason}")).ok()?;
        let on = |host| Conditions { host: Some(host), kill_point: "" };
        let exporter = start(&on(&hosts.exporter), "exporter", "")?;
        let importer = start(&on(&hosts.importer), "importer", "")?;
        Some(Self { exporter, importer, hosts: Some(hosts) })
    }

    /// Returns the address of the exporter, and that of the importer.
    pub(crate) fn addresses(&self) -> [&'static str; 2] {
        self.hosts.as_ref().map_or([LOOPBACK; 2], |hosts| [hosts.exporter.address, hosts.importer.address])
    }

    pub(crate) fn open(&mut self, mode: &str, seed: u8, timeout: u32, descriptor: &str) -> String {
        self.importer.ask(&format!("open {mode} {seed} {timeout} {descriptor}"))
    }

    /// Starts a pull on another thread of the importer; returns when the first bytes have arrived. It does not end before
    /// [`let_go`](Self::let_go), except by an error.
    pub(crate) fn begin(&mut self, length: usize, timeout: u32) -> String {
        self.begin_request("open pulled", length, timeout)
    }

    /// As [`begin`](Self::begin), with another request for a copy.
    pub(crate) fn begin_request(&mut self, request: &str, length: usize, timeout: u32) -> String {
        let descriptor = self.exporter.ask(&format!("share x {length} 1"));
        self.importer.ask("hold true");
        self.importer.ask(&format!("begin {request} 1 {timeout} {descriptor}"));
        let deadline = Instant::now() + crate::LONG;
        while self.importer.ask("arriving") != "true" {
            assert!(Instant::now() < deadline, "no bytes arrive: {}", self.importer.ask("end"));
        }
        descriptor
    }

    /// Lets the importer's copy end.
    pub(crate) fn let_go(&mut self) {
        self.importer.ask("hold false");
    }

    /// Returns the open files and the memory of both processes.
    pub(crate) fn resources(&mut self) -> [Resources; 2] {
        [&mut self.exporter, &mut self.importer].map(Resources::of)
    }

    /// Waits until the processes have hardly more than these.
    #[track_caller]
    pub(crate) fn check_resources(&mut self, before: &[Resources; 2]) {
        before[0].eventually_left_by(&mut self.exporter);
        before[1].eventually_left_by(&mut self.importer);
    }

    pub(crate) fn finish(self) {
        self.importer.finish();
        self.exporter.finish();
    }
}

/// The open files of a process, its mappings of the mock's memory, and the blocks and bytes on its heap. The memory of an engine that is
/// not written in Rust does not count.
#[derive(Debug)]
pub struct Resources {
    files: u64,
    mappings: u64,
    blocks: u64,
    bytes: u64,
}

impl Resources {
    /// Returns what a process has now.
    pub fn of(process: &mut Process) -> Self {
        let answer = process.ask("resources");
        let numbers: Vec<u64> = answer.split(' ').map(|word| word.parse().expect("a number")).collect();
        let [files, mappings, blocks, bytes] = numbers[..] else { panic!("{answer}") };
        Self { files, mappings, blocks, bytes }
    }

    /// Waits until the process has hardly more of them than these: UCX keeps a connection when it makes another one to the same peer,
    /// and tables grow.
    #[track_caller]
    pub fn eventually_left_by(&self, process: &mut Process) {
        self.eventually_left_with_files(4, process);
    }

    /// As [`eventually_left_by`](Self::eventually_left_by), with more files.
    #[track_caller]
    pub fn eventually_left_with_files(&self, more: u64, process: &mut Process) {
        const MORE_BLOCKS: u64 = 100;
        const MORE_BYTES: u64 = 64 << 10;
        let deadline = Instant::now() + crate::LONG;
        loop {
            let now = Self::of(process);
            if now.files <= self.files + more
                && now.mappings <= self.mappings
                && now.blocks <= self.blocks + MORE_BLOCKS
                && now.bytes <= self.bytes + MORE_BYTES
            {
                return;
            }
            assert!(Instant::now() < deadline, "{self:?}, then {now:?}");
            // Other threads close connections and free memory.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
